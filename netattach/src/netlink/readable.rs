//! Waits for notifications on a netlink socket, known to the async runtime only while it waits.

use std::io;
use std::os::fd::AsRawFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Returns once there is something to read. A socket that stayed registered would have the kernel wake the runtime's thread for
/// each notification, in the midst of the change that caused it and whether or not anybody waits: some thirty times for a pod.
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
