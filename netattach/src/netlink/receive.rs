//! Receives what the kernel sends, each datagram whole however long it is: one that does not fit is cut, what was cut off is
//! lost, and the rest is read as malformed, or as less than it said.

use std::io;

use netlink_sys::Socket as RawSocket;

use super::Error;

/// Room for a datagram of the kernel as a rule (`NLMSG_GOODSIZE` rounds up to 8 KiB, dumps to 32 KiB).
const ROOM: usize = 64 << 10;
/// The longest. The kernel allocates none of more than 4 MiB: one link is described by as much if somebody has given a macvlan
/// hundreds of thousands of source addresses, and by more than the room of a rule if it has all other names that it may have;
/// a refusal repeats what was refused.
const LONGEST: usize = 8 << 20;

/// The datagram that was received last, and its room, which grows for one that is longer.
pub(super) struct Receiver(Vec<u8>);

impl Receiver {
    /// Has received nothing yet.
    pub(super) fn new() -> Self {
        Self(Vec::with_capacity(ROOM))
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
        self.0.clear();
        // How long it is; it stays where it is.
        let length = socket.recv::<&mut [u8]>(&mut &mut [][..], libc::MSG_PEEK | libc::MSG_TRUNC)?;
        if length > LONGEST {
            // Without room nothing is received, and the socket has it no longer.
            socket.recv::<&mut [u8]>(&mut &mut [][..], 0)?;
            return Err(io::Error::from_raw_os_error(libc::ENOBUFS));
        }
        if length <= ROOM {
            // One that was longer, a hostile one, does not keep its room.
            self.0.shrink_to(ROOM);
        }
        self.0.reserve(length);
        socket.recv(&mut self.0, 0).map(drop)
    }

    /// The datagram that was received last; empty: none was.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The next datagram, as an answer to that request.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    pub(super) fn answer(&mut self, socket: &RawSocket, request: &'static str) -> Result<&[u8], Error> {
        self.receive(socket).map_err(|source| Error::Receive(request, source))?;
        Ok(self.bytes())
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
        let mut request = (bytes as u32).to_ne_bytes().to_vec();
        // No kind of message has that number; a request, to be acknowledged.
        request.extend(u16::MAX.to_ne_bytes());
        request.extend(5_u16.to_ne_bytes());
        request.resize(bytes, 0);
        assert_eq!(socket.send(&request, 0).unwrap(), bytes);
        socket
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
        assert!(receiver.0.capacity() < 2 * ROOM, "{}", receiver.0.capacity());
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
