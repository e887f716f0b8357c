//! Waits for notifications on a netlink socket, which is registered with the async runtime only during the
//! wait.

use std::io;
use std::os::fd::AsRawFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Returns once the socket is readable. If the socket stayed registered, the kernel would wake the runtime's
/// thread for each notification, in the middle of the change that caused it and even while no task waits:
/// some thirty times for a pod.
///
/// # Errors
/// The runtime refused the descriptor.
pub(super) async fn readable(socket: &impl AsRawFd) -> io::Result<()> {
    // SAFETY: the descriptor is the socket's own. It stays open and the same for as long as the socket is borrowed, which is
    // longer than the registration, dropped here.
    let registered = unsafe { AsyncFd::register_with_interest(socket.as_raw_fd(), Interest::READABLE) }?;
    registered.readable().await?.retain_ready();
    Ok(())
}
