//! The number of files that this process may open, and has open.

use std::io;
use std::sync::OnceLock;

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit, setrlimit};

/// Several times the number that the agent needs when every limit of its own is reached.
const WANTED: u64 = 65_536;

/// The limit that this process was started with.
static FIRST: OnceLock<Rlimit> = OnceLock::new();

/// Raises the limit as far as possible, to [`WANTED`] at most.
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

/// Sets a child's limit to the one this process was started with: programs that iterate over all descriptors, or that
/// use select(2), rely on it.
pub(crate) fn lower_for(child: Pid) {
    if let Some(first) = FIRST.get() {
        // Fails if the child has ended, which then needs no limit.
        let _ = prlimit(Some(child), Resource::Nofile, *first);
    }
}

/// Returns the number of open files and the limit.
///
/// # Errors
/// They cannot be counted, for example if no descriptor is left.
pub(crate) fn used() -> io::Result<(u64, u64)> {
    const OPEN: &str = "/proc/self/fd";
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    // Linux 6.2 and later report the number as the size of the directory (`proc_fd_getattr` of fs/proc/fd.c). Listing
    // creates an inode for each.
    let open = match std::fs::metadata(OPEN)?.len() {
        0 => listed(OPEN)?,
        open => open,
    };
    Ok((open, most))
}

fn listed(directory: &str) -> io::Result<u64> {
    // Without the descriptor of this directory.
    Ok((std::fs::read_dir(directory)?.count() as u64).saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_opened_is_counted() {
        let (before, most) = used().unwrap();
        let files: Vec<_> = (0..200).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        let (now, _) = used().unwrap();
        let listed = listed("/proc/self/fd").unwrap();
        drop(files);
        // Other tests open and close some meanwhile.
        assert!(now >= before + 100 && now <= most, "{before} {now} {most}");
        assert!(listed.abs_diff(now) < 100, "{listed} {now}");
    }
}
