//! Receives datagrams of the kernel whole, however long they are. A datagram that does not fit into the
//! buffer is truncated: the rest is lost, and the part that was received is parsed as malformed or as less
//! than the kernel said.

use std::io;

use netlink_sys::{Socket as RawSocket, protocols::NETLINK_ROUTE};

use super::Error;

/// Buffer for the usual datagram of the kernel (`NLMSG_GOODSIZE` rounds up to 8 KiB, dumps to 32 KiB).
const ROOM: usize = 64 << 10;
/// Length of the longest datagram: a macvlan with some 700,000 source addresses. For a dump the kernel
/// allocates no more than 4 MiB; newer kernels allocate as much as necessary for the answer to a request for
/// one link. A link with as many alternative names as it may have exceeds [`ROOM`] too, and a refusal repeats
/// the refused request.
pub(super) const LONGEST: usize = 8 << 20;
/// Most datagrams that are discarded after a loss: more than the answers to all requests that are sent at
/// once.
const MOST_BESIDE: usize = 1 << 10;

/// The last received datagram and its buffer, which grows for a longer datagram.
pub(super) struct Receiver {
    bytes: Vec<u8>,
    /// Whether the length of each datagram is read first.
    peeks: bool,
}

impl Receiver {
    /// A receiver for answers, none of which may be lost.
    pub(super) fn new() -> Self {
        Self { bytes: Vec::with_capacity(ROOM), peeks: true }
    }

    /// A receiver for notifications, of which an ADD causes a hundred. The first notification that is longer
    /// than the buffer is lost, which is reported; from then on the length of each one is read first.
    pub(super) fn of_notifications() -> Self {
        Self { peeks: false, ..Self::new() }
    }

    /// Whether the next datagrams are sure to fit into the buffer, so that their lengths need not be read first.
    pub(super) fn expect_short(&mut self, are_short: bool) {
        self.peeks = !are_short;
    }

    /// Receives the next datagram into [`Receiver::bytes`]. Waits if the socket is blocking.
    ///
    /// # Errors
    /// Those of the kernel. `ENOBUFS`: data was lost, either in the kernel or because the datagram exceeds
    /// [`LONGEST`].
    pub(super) fn receive(&mut self, socket: &RawSocket) -> io::Result<()> {
        loop {
            match self.try_receive(socket) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                received => return received,
            }
        }
    }

    fn try_receive(&mut self, socket: &RawSocket) -> io::Result<()> {
        self.bytes.clear();
        if !self.peeks {
            self.bytes.reserve(ROOM);
            let length = socket.recv(&mut self.bytes, libc::MSG_TRUNC)?;
            if length > self.bytes.len() {
                self.peeks = true;
                self.bytes.clear();
                return Err(io::Error::from_raw_os_error(libc::ENOBUFS));
            }
            return Ok(());
        }
        // Reads the length; the datagram stays in the socket.
        let length = socket.recv::<&mut [u8]>(&mut &mut [][..], libc::MSG_PEEK | libc::MSG_TRUNC)?;
        if length > LONGEST {
            // Receiving without a buffer removes the datagram from the socket.
            socket.recv::<&mut [u8]>(&mut &mut [][..], 0)?;
            return Err(io::Error::from_raw_os_error(libc::ENOBUFS));
        }
        if length <= ROOM {
            // Releases the memory that a longer, hostile datagram has taken.
            self.bytes.shrink_to(ROOM);
        }
        self.bytes.reserve(length);
        socket.recv(&mut self.bytes, 0).map(drop)
    }

    /// The last received datagram; empty: none was received.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the next datagram as an answer to that request. After a loss, also discards what is still in
    /// the socket: until that is read, the kernel drops everything else, including the answers to later
    /// requests.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    pub(super) fn answer(&mut self, socket: &RawSocket, request: &'static str) -> Result<&[u8], Error> {
        if let Err(source) = self.receive(socket) {
            if source.raw_os_error() == Some(libc::ENOBUFS) {
                clear(socket);
            }
            return Err(Error::Receive(request, source));
        }
        Ok(self.bytes())
    }
}

/// Opens a socket that receives the notifications of these groups without waiting for them, of which `queue` bytes may
/// wait.
pub(super) fn subscribed(groups: impl IntoIterator<Item = u32>, queue: usize) -> io::Result<RawSocket> {
    let mut socket = RawSocket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    for group in groups {
        socket.add_membership(group)?;
    }
    socket.set_non_blocking(true)?;
    // If the kernel refuses the size, more notifications are lost, which is reported.
    let _ = rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, queue);
    Ok(socket)
}

/// Discards the datagrams in a socket.
fn clear(socket: &RawSocket) {
    for _ in 0..MOST_BESIDE {
        match socket.recv::<&mut [u8]>(&mut &mut [][..], libc::MSG_DONTWAIT) {
            Err(error) if ![Some(libc::ENOBUFS), Some(libc::EINTR)].contains(&error.raw_os_error()) => return,
            _ => {}
        }
    }
}

impl std::fmt::Debug for Receiver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Receiver").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A socket without privileges that has sent a request: the kernel refuses the request and repeats it in
    /// its answer.
    fn refused(bytes: usize) -> RawSocket {
        let mut socket = RawSocket::new(NETLINK_ROUTE).unwrap();
        socket.bind_auto().unwrap();
        assert_eq!(socket.send(&request(bytes), 0).unwrap(), bytes);
        socket
    }

    fn request(bytes: usize) -> Vec<u8> {
        let mut request = (bytes as u32).to_ne_bytes().to_vec();
        // No message has this type; the flags ask for an acknowledgement.
        request.extend(u16::MAX.to_ne_bytes());
        request.extend(5_u16.to_ne_bytes());
        request.resize(bytes, 0);
        request
    }

    #[test]
    fn a_datagram_is_received_whole_and_its_room_is_given_back() {
        // `struct nlmsghdr` and `struct nlmsgerr` without the header that the latter repeats.
        let further = 16 + 4;
        let mut receiver = Receiver::new();
        for bytes in [100, ROOM - further, ROOM, 2 * ROOM, 100] {
            let answer = receiver.answer(&refused(bytes), "a request").unwrap();
            let told = u32::from_ne_bytes(*answer.first_chunk().unwrap()) as usize;
            assert_eq!((answer.len(), told), (bytes + further, bytes + further));
        }
        assert!(receiver.bytes.capacity() < 2 * ROOM, "{}", receiver.bytes.capacity());
    }

    #[test]
    fn a_notification_that_is_longer_than_the_room_is_lost_and_the_next_is_not() {
        let mut receiver = Receiver::of_notifications();
        let mut lengths = [100, 2 * ROOM, 100, 2 * ROOM].map(|bytes| {
            let received = receiver.receive(&refused(bytes));
            received.map(|()| receiver.bytes().len()).map_err(|error| error.raw_os_error())
        });
        // `struct nlmsghdr` and `struct nlmsgerr` without the header that the latter repeats.
        lengths.iter_mut().flatten().for_each(|length| *length -= 16 + 4);
        assert_eq!(lengths, [Ok(100), Err(Some(libc::ENOBUFS)), Ok(100), Ok(2 * ROOM)]);
    }

    #[test]
    fn after_a_loss_later_answers_are_received() {
        let mut socket = RawSocket::new(NETLINK_ROUTE).unwrap();
        socket.bind_auto().unwrap();
        rustix::net::sockopt::set_socket_recv_buffer_size(&socket, ROOM).unwrap();
        let mut receiver = Receiver::new();
        for _ in 0..2 {
            // Each refusal is as long as its request.
            for _ in 0..8 {
                socket.send(&request(ROOM), 0).unwrap();
            }
            let error = receiver.answer(&socket, "requests").unwrap_err();
            assert!(error.is_too_many(), "{error}");
            assert_eq!(socket.send(&request(100), 0).unwrap(), 100);
            let answer = receiver.answer(&socket, "a request").unwrap();
            assert_eq!(answer.len(), 16 + 4 + 100);
        }
    }

    #[test]
    fn nothing_to_receive_is_told() {
        let mut socket = RawSocket::new(NETLINK_ROUTE).unwrap();
        socket.bind_auto().unwrap();
        socket.set_non_blocking(true).unwrap();
        let mut receiver = Receiver::new();
        let error = receiver.receive(&socket).unwrap_err();
        assert_eq!((error.kind(), receiver.bytes()), (io::ErrorKind::WouldBlock, &[][..]));
    }
}
