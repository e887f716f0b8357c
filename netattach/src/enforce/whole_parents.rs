//! Results for parents within one check: hundreds of macvlans of a node share a few parents.

use std::collections::BTreeSet;

/// The parents whose programs a check has found complete. Valid for the other attachments of the same check
/// only.
#[derive(Debug, Default)]
pub struct WholeParents {
    whole: BTreeSet<u32>,
    /// Whether filters are not listed where the kernel has told of no change.
    relies_on_the_kernel: bool,
}

impl WholeParents {
    /// Those of a check that is repeated: it lists the filters of a device only if the kernel has told of a change,
    /// or not for long. One that has a reason to look, such as a notification, lists them in any case: the same
    /// notification may not have reached all sockets yet.
    pub fn of_a_round() -> Self {
        Self { relies_on_the_kernel: true, ..Self::default() }
    }

    /// Whether filters are listed although the kernel has told of no change.
    pub(super) fn lists_afresh(&self) -> bool {
        !self.relies_on_the_kernel
    }

    /// Returns what an attachment's programs lack, checked once for all attachments on a parent whose
    /// programs lack nothing, and for each other attachment. `parent`: index of the parent on which the
    /// attachment's programs run, if they run on one.
    pub(super) fn lack<T, E>(
        &mut self,
        parent: Option<u32>,
        ask: impl FnOnce() -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        if parent.is_some_and(|parent| self.whole.contains(&parent)) {
            return Ok(None);
        }
        let lack = ask()?;
        if lack.is_none() {
            self.whole.extend(parent);
        }
        Ok(lack)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_is_asked_for_until_it_lacks_nothing_and_every_other_device_each_time() {
        let (mut known, mut asked) = (WholeParents::default(), Vec::new());
        let mut lack = |of: &'static str, parent, answer: Result<Option<&'static str>, &'static str>| {
            known.lack(parent, || {
                asked.push(of);
                answer
            })
        };
        assert_eq!(lack("failed", Some(3), Err("refused")), Err("refused"));
        assert_eq!(lack("bare", Some(3), Ok(Some("a program"))), Ok(Some("a program")));
        assert_eq!(lack("whole", Some(3), Ok(None)), Ok(None));
        assert_eq!(lack("the next on it", Some(3), Ok(Some("never asked"))), Ok(None));
        assert_eq!(lack("another parent", Some(4), Ok(Some("a program"))), Ok(Some("a program")));
        assert_eq!(lack("own", None, Ok(None)), Ok(None));
        assert_eq!(lack("own too", None, Ok(Some("a program"))), Ok(Some("a program")));
        assert_eq!(asked, ["failed", "bare", "whole", "another parent", "own", "own too"]);
    }
}
