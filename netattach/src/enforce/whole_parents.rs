//! Results for parents within one check: hundreds of macvlans of a node share a few parents.

use std::collections::BTreeSet;

/// The parents whose programs a check has found complete. Valid for the other attachments of the same check
/// only.
#[derive(Debug, Default)]
pub struct WholeParents(BTreeSet<u32>);

impl WholeParents {
    /// Returns what an attachment's programs lack, checked once for all attachments on a parent whose
    /// programs lack nothing, and for each other attachment. `parent`: index of the parent on which the
    /// attachment's programs run, if they run on one.
    pub(super) fn lack<T, E>(
        &mut self,
        parent: Option<u32>,
        ask: impl FnOnce() -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        if parent.is_some_and(|parent| self.0.contains(&parent)) {
            return Ok(None);
        }
        let lack = ask()?;
        if lack.is_none() {
            self.0.extend(parent);
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
