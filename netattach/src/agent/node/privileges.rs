//! Checks the agent's privileges before anything else: otherwise a missing capability would cause an error
//! in the first operation that needs it, which rarely names it.

use std::io;
use std::os::unix::fs::MetadataExt;

use rustix::thread::CapabilitySet;

/// Inode of the machine's first user namespace (`PROC_USER_INIT_INO` of `linux/proc_ns.h`).
const FIRST_USER_NAMESPACE: u64 = 0xefff_fffd;

/// A capability, its name, and what it is for.
type Need = (CapabilitySet, &'static str, &'static str);

/// Needed to start plugins in another root directory.
const FOR_ANOTHER_ROOT: Need = (
    CapabilitySet::SYS_CHROOT,
    "CAP_SYS_CHROOT",
    "to start plugins in the root directory that delegation.root names",
);

/// The required capabilities, and what needs them. `CAP_SYS_ADMIN` includes `CAP_BPF` and `CAP_PERFMON`
/// (capabilities(7)), so these are not required in addition.
const NEEDED: [Need; 2] = [
    (
        CapabilitySet::SYS_ADMIN,
        "CAP_SYS_ADMIN",
        "to enter the network namespaces of pods and to load BPF programs",
    ),
    (CapabilitySet::NET_ADMIN, "CAP_NET_ADMIN", "to make links, addresses, routes and filters"),
];

/// The agent lacks privileges that it needs.
#[derive(Debug, thiserror::Error)]
pub enum Unprivileged {
    /// The capabilities cannot be read.
    #[error("read the capabilities of this process")]
    Look(#[source] io::Error),
    /// Capabilities are missing.
    #[error(
        "this process (user id {user}) lacks {}: run netattachd as root, or in a container with these capabilities",
        missing.join(", ")
    )]
    Missing {
        /// User id of the process.
        user: u32,
        /// The missing capabilities, each with its use.
        missing: Vec<String>,
    },
    /// The capabilities apply to a user namespace only.
    #[error(
        "this process is in a user namespace, where no capability reaches the node's devices and BPF: run netattachd as root of \
         the machine, in a container without `hostUsers: false`"
    )]
    UserNamespace,
}

/// Checks that this process has the agent's privileges.
///
/// # Errors
/// The missing privileges, by name.
pub fn check() -> Result<(), Unprivileged> {
    let sets = rustix::thread::capabilities(None).map_err(|errno| Unprivileged::Look(errno.into()))?;
    let namespace = std::fs::metadata("/proc/self/ns/user").map(|metadata| metadata.ino());
    // If /proc is unusable, only the capabilities are checked.
    judge(rustix::process::geteuid().as_raw(), sets.effective, namespace.unwrap_or(FIRST_USER_NAMESPACE))
}

/// Checks that this process may start others in another root directory.
///
/// # Errors
/// The missing capability.
pub(super) fn check_another_root() -> Result<(), Unprivileged> {
    let sets = rustix::thread::capabilities(None).map_err(|errno| Unprivileged::Look(errno.into()))?;
    let user = rustix::process::geteuid().as_raw();
    match lacking(&[FOR_ANOTHER_ROOT], sets.effective) {
        missing if missing.is_empty() => Ok(()),
        missing => Err(Unprivileged::Missing { user, missing }),
    }
}

fn lacking(needed: &[Need], has: CapabilitySet) -> Vec<String> {
    let missing = needed.iter().filter(|(capability, ..)| !has.contains(*capability));
    missing.map(|(_, name, purpose)| format!("{name} ({purpose})")).collect()
}

fn judge(user: u32, has: CapabilitySet, user_namespace: u64) -> Result<(), Unprivileged> {
    let missing = lacking(&NEEDED, has);
    if !missing.is_empty() {
        return Err(Unprivileged::Missing { user, missing });
    }
    if user_namespace != FIRST_USER_NAMESPACE {
        return Err(Unprivileged::UserNamespace);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_capability_that_is_missing_is_named_with_what_it_is_for() {
        let judged = |has, namespace| judge(1000, has, namespace).map_err(|error| error.to_string());
        let both = CapabilitySet::SYS_ADMIN | CapabilitySet::NET_ADMIN;
        let lacks = |what: &str| {
            Err(format!(
                "this process (user id 1000) lacks {what}: run netattachd as root, or in a container with these capabilities"
            ))
        };
        let admin = "CAP_SYS_ADMIN (to enter the network namespaces of pods and to load BPF programs)";
        let net = "CAP_NET_ADMIN (to make links, addresses, routes and filters)";
        assert_eq!(judged(both, FIRST_USER_NAMESPACE), Ok(()));
        assert_eq!(judged(both | CapabilitySet::BPF, FIRST_USER_NAMESPACE), Ok(()));
        assert_eq!(judged(CapabilitySet::NET_ADMIN | CapabilitySet::BPF, FIRST_USER_NAMESPACE), lacks(admin));
        assert_eq!(judged(CapabilitySet::SYS_ADMIN, FIRST_USER_NAMESPACE), lacks(net));
        assert_eq!(judged(CapabilitySet::empty(), 7), lacks(&format!("{admin}, {net}")));
        assert!(judged(both, 7).unwrap_err().starts_with("this process is in a user namespace"));
    }
}
