//! Has the kernel drop notifications that a socket's reader does not need: only a queued notification wakes
//! the reader.

use std::io;
use std::os::fd::AsRawFd;

/// `linux/filter.h`: load a word, a half-word or a byte at a fixed offset, compare with a constant, return the bytes to keep.
const LOAD_WORD: u16 = 0x20;
const LOAD_HALF: u16 = 0x28;
const LOAD_BYTE: u16 = 0x30;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;
/// Offset of `nlmsg_type`.
const TYPE_AT: u32 = 4;
/// Offset of the address family, which is the first byte after the header in most messages.
const FAMILY_AT: u32 = 16;
/// Offset of the link's index, in messages about links and about addresses.
const LINK_AT: u32 = 20;

/// The part of a notification that decides. A datagram is judged by its first message: a datagram with
/// several different messages is about one object that was replaced, and its first message says that the old
/// object is gone.
#[derive(Debug, Clone, Copy)]
pub(super) enum By<'a> {
    /// Its type is one of these.
    Type(&'a [u16]),
    /// Its address family.
    Family(u8),
    /// It is about one of these links. At most 250.
    Link(&'a [u32]),
}

/// From now on the socket receives only notifications that match.
///
/// # Errors
/// The kernel refused the filter.
pub(super) fn receive_only(socket: &impl AsRawFd, by: By<'_>) -> io::Result<()> {
    attach(socket, &mut program(by))
}

/// From now on the socket receives only messages that the program accepts; the kernel verifies the program.
///
/// # Errors
/// The kernel refused the program.
pub(crate) fn attach(socket: &impl AsRawFd, code: &mut [libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog {
        // A handful of instructions.
        len: u16::try_from(code.len()).map_err(io::Error::other)?,
        filter: code.as_mut_ptr(),
    };
    // SAFETY: the kernel reads `size_of::<sock_fprog>()` bytes at `program`, and from there `len` instructions of `code`, which
    // lives until after the call; it copies both.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size_of_val(&program) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn program(by: By<'_>) -> Vec<libc::sock_filter> {
    let statement = |code, k| libc::sock_filter { code, jt: 0, jf: 0, k };
    let (load, wanted) = match by {
        // A load interprets the bytes as big-endian.
        By::Type(types) => {
            (statement(LOAD_HALF, TYPE_AT), types.iter().map(|it| u32::from(it.to_be())).collect::<Vec<_>>())
        }
        By::Link(links) => (statement(LOAD_WORD, LINK_AT), links.iter().map(|it| it.to_be()).collect()),
        By::Family(family) => (statement(LOAD_BYTE, FAMILY_AT), vec![u32::from(family)]),
    };
    let mut code = vec![load];
    for (left, value) in (0..wanted.len()).rev().zip(wanted) {
        // Jumps to the last instruction, past the other comparisons and the instruction that drops.
        let jt = u8::try_from(left + 1).unwrap_or(u8::MAX);
        code.push(libc::sock_filter { code: JUMP_IF_EQUAL, jt, jf: 0, k: value });
    }
    code.extend([statement(RETURN, 0), statement(RETURN, u32::MAX)]);
    code
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use super::*;

    const TYPES: [u16; 3] = [37, 45, 300];

    fn received<const N: usize>(by: By<'_>, datagrams: &[[u8; N]]) -> Vec<[u8; N]> {
        let (sender, receiver) = UnixDatagram::pair().unwrap();
        receive_only(&receiver, by).unwrap();
        for datagram in datagrams {
            assert_eq!(sender.send(datagram).unwrap(), datagram.len());
        }
        receiver.set_nonblocking(true).unwrap();
        let mut buffer = [0; N];
        std::iter::from_fn(|| receiver.recv(&mut buffer).ok().filter(|length| *length > 0).map(|_| buffer))
            .collect()
    }

    fn message(kind: u16, family: u8) -> [u8; 20] {
        let mut message = [0; 20];
        message[..4].copy_from_slice(&20_u32.to_ne_bytes());
        message[4..6].copy_from_slice(&kind.to_ne_bytes());
        message[16] = family;
        message
    }

    #[test]
    fn only_messages_of_the_types_arrive() {
        let all = [36, 37, 44, 45, 300, 0x2500].map(|kind| message(kind, 0));
        assert_eq!(received(By::Type(&TYPES), &all), [all[1], all[3], all[4]]);
    }

    #[test]
    fn only_messages_about_the_links_arrive() {
        let about = |link: u32| {
            let mut message = message(16, 0);
            message[16..].copy_from_slice(&[0; 4]);
            [&message[..], &link.to_ne_bytes()].concat().try_into().unwrap()
        };
        let all: [[u8; 24]; 3] = [3, 0x0300_0000, 7].map(about);
        assert_eq!(received(By::Link(&[7, 3]), &all), [all[0], all[2]]);
        assert_eq!(received(By::Link(&[]), &all), [] as [[u8; 24]; 0]);
    }

    #[test]
    fn only_messages_of_the_family_arrive() {
        let all = [2, 7, 10].map(|family| message(28, family));
        assert_eq!(received(By::Family(7), &all), [all[1]]);
    }
}
