//! Receives what the kernel sends, each datagram whole however long it is: one that does not fit is cut, what was cut off is
//! lost, and the rest is read as malformed, or as less than it said.

use std::io;

use netlink_sys::Socket as RawSocket;

use super::Error;

/// Room for a datagram of the kernel as a rule (`NLMSG_GOODSIZE` rounds up to 8 KiB, dumps to 32 KiB).
const ROOM: usize = 64 << 10;
/// The longest, of some 700,000 source addresses that somebody has given a macvlan. For a list the kernel allocates no more than
/// 4 MiB; newer ones for the answer to a request for one link as much as it takes. A link with all other names that it may have
/// is described by more than the room of a rule as well; a refusal repeats what was refused.
pub(super) const LONGEST: usize = 8 << 20;
/// Most datagrams that are thrown away beside what was lost: more than the answers to as many requests as are sent at once.
const MOST_BESIDE: usize = 1 << 10;

/// The datagram that was received last, and its room, which grows for one that is longer.
pub(super) struct Receiver {
    bytes: Vec<u8>,
    /// Whether each is asked for its length first.
    peeks: bool,
}

impl Receiver {
    /// Has received nothing yet. For answers, of which none may be lost.
    pub(super) fn new() -> Self {
        Self { bytes: Vec::with_capacity(ROOM), peeks: true }
    }

    /// The same for notifications, of which an ADD brings a hundred: their length is asked for once one has been longer than the
    /// room, which is lost, and said to be.
    pub(super) fn of_notifications() -> Self {
        Self { peeks: false, ..Self::new() }
    }

    /// Receives the next datagram, of which [`Receiver::bytes`] are all bytes then. Waits for it as the socket does.
    ///
    /// # Errors
    /// Those of the kernel. `ENOBUFS`: something was lost, by the kernel or as it is longer than all that the kernel sends.
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
        // How long it is; it stays where it is.
        let length = socket.recv::<&mut [u8]>(&mut &mut [][..], libc::MSG_PEEK | libc::MSG_TRUNC)?;
        if length > LONGEST {
            // Without room nothing is received, and the socket has it no longer.
            socket.recv::<&mut [u8]>(&mut &mut [][..], 0)?;
            return Err(io::Error::from_raw_os_error(libc::ENOBUFS));
        }
        if length <= ROOM {
            // One that was longer, a hostile one, does not keep its room.
            self.bytes.shrink_to(ROOM);
        }
        self.bytes.reserve(length);
        socket.recv(&mut self.bytes, 0).map(drop)
    }

    /// The datagram that was received last; empty: none was.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The next datagram, as an answer to that request. Where something was lost, so is what the socket has still: until that is
    /// read the kernel drops all else, the answers to later requests as well.
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

/// Throws away what a socket has.
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
    use netlink_sys::protocols::NETLINK_ROUTE;

    use super::*;

    /// A socket without privileges that is answered by what it has sent: the kernel refuses it, and repeats it.
    fn refused(bytes: usize) -> RawSocket {
        let mut socket = RawSocket::new(NETLINK_ROUTE).unwrap();
        socket.bind_auto().unwrap();
        assert_eq!(socket.send(&request(bytes), 0).unwrap(), bytes);
        socket
    }

    fn request(bytes: usize) -> Vec<u8> {
        let mut request = (bytes as u32).to_ne_bytes().to_vec();
        // No kind of message has that number; a request, to be acknowledged.
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
            // Each is refused by as much as it is long.
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
