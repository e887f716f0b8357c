//! How many files this process may have open, and has.

use std::io;
use std::sync::OnceLock;

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit, setrlimit};

/// As many as the agent can come to need with every bound of its own reached, some times over.
const WANTED: u64 = 65_536;

/// The limit that this process was started with.
static FIRST: OnceLock<Rlimit> = OnceLock::new();

/// Raises the limit as far as it may be, to [`WANTED`] at most.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn raise() -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(WANTED, |most| most.min(WANTED));
    if limit.current.is_none_or(|current| current >= wanted) {
        return Ok(());
    }
    let first = *FIRST.get_or_init(|| limit);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), ..first })?)
}

/// Gives a child the limit that this process was started with: programs that walk through all descriptors, or that
/// use select(2), count on it.
pub(crate) fn lower_for(child: Pid) {
    if let Some(first) = FIRST.get() {
        // A child that has ended needs none.
        let _ = prlimit(Some(child), Resource::Nofile, *first);
    }
}

/// How many are open and how many may be.
///
/// # Errors
/// They cannot be counted, where none is left to look with.
pub(crate) fn used() -> io::Result<(u64, u64)> {
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    // Less the one that is looked with.
    let open = std::fs::read_dir("/proc/self/fd")?.count() as u64 - 1;
    Ok((open, most))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_opened_is_counted() {
        let (before, most) = used().unwrap();
        let files: Vec<_> = (0..200).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        let (now, _) = used().unwrap();
        drop(files);
        // Other tests open and close some meanwhile.
        assert!(now >= before + 100 && now <= most, "{before} {now} {most}");
    }
}
