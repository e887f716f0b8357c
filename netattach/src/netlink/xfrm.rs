//! Detects IPsec on the node: if there are policies, forwarded packets have to pass them.

use std::io;

use netlink_sys::{Socket as RawSocket, protocols::NETLINK_XFRM};

use super::{Error, Refused};

const NAME: &str = "XFRM_MSG_GETSPDINFO";
/// `linux/xfrm.h`: requests the number of policies.
const GET_SPD_INFO: u16 = 0x25;
const NEW_SPD_INFO: u16 = 0x24;
const XFRMA_SPD_INFO: u16 = 1;
const NLMSG_ERROR: u16 = 2;
const REQUEST: u16 = 1;
const HEADER_LEN: usize = 16;
/// Length of the flags at the start of the message.
const FLAGS_LEN: usize = 4;
/// Length of an attribute's header.
const ATTRIBUTE_LEN: usize = 4;
/// `struct xfrmu_spdinfo` begins with the numbers of inbound, outbound and forward policies.
const COUNTS: usize = 3;

/// The IPsec policies of a namespace, which are asked for every second, by one socket.
#[derive(Default)]
pub struct IpsecPolicies(Option<RawSocket>);

impl IpsecPolicies {
    /// Whether there are any in the namespace of the thread that called this first. A kernel without IPsec has none.
    ///
    /// # Errors
    /// The kernel did not answer. The next call opens another socket.
    pub fn are_any(&mut self) -> Result<bool, Error> {
        let socket = match self.0.take() {
            Some(socket) => socket,
            None => match open() {
                Ok(socket) => socket,
                Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => return Ok(false),
                Err(error) => return Err(Error::Open(error)),
            },
        };
        socket.send(&request(), 0).map_err(|source| Error::Send(NAME, source))?;
        // Three structures of numbers, some 100 bytes; a refusal repeats the request.
        let mut buffer = [0; 1024];
        let length = loop {
            match socket.recv(&mut &mut buffer[..], 0) {
                Ok(length) => break length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(Error::Receive(NAME, source)),
            }
        };
        // The request gets one answer, so that nothing is left in the socket.
        self.0 = Some(socket);
        match answer(&buffer[..length]) {
            Answer::Policies(any) => Ok(any),
            Answer::Refused(libc::EINVAL | libc::EOPNOTSUPP) => Ok(false),
            Answer::Refused(errno) => Err(Refused { request: NAME, errno, text: None }.into()),
        }
    }
}

impl std::fmt::Debug for IpsecPolicies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IpsecPolicies").finish_non_exhaustive()
    }
}

fn open() -> io::Result<RawSocket> {
    let mut socket = RawSocket::new(NETLINK_XFRM)?;
    socket.bind_auto()?;
    Ok(socket)
}

fn request() -> Vec<u8> {
    let length = HEADER_LEN + FLAGS_LEN;
    let mut request = (length as u32).to_ne_bytes().to_vec();
    request.extend(GET_SPD_INFO.to_ne_bytes());
    request.extend(REQUEST.to_ne_bytes());
    request.resize(length, 0);
    request
}

#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Policies(bool),
    /// The kernel refused, with this errno.
    Refused(i32),
}

/// An answer that cannot be parsed counts as policies: packets that may need encryption are left to the stack.
fn answer(datagram: &[u8]) -> Answer {
    let half = |at: usize| Some(u16::from_ne_bytes(datagram.get(at..at + 2)?.try_into().ok()?));
    let word = |at: usize| Some(u32::from_ne_bytes(datagram.get(at..at + 4)?.try_into().ok()?));
    let at = HEADER_LEN + FLAGS_LEN;
    match half(4) {
        Some(NLMSG_ERROR) => {
            Answer::Refused(word(HEADER_LEN).map_or(libc::EPROTO, |code| code.cast_signed().saturating_neg()))
        }
        Some(NEW_SPD_INFO) if half(at + 2) == Some(XFRMA_SPD_INFO) => {
            let counts = (0..COUNTS).map(|count| word(at + ATTRIBUTE_LEN + 4 * count));
            Answer::Policies(counts.into_iter().any(|count| count != Some(0)))
        }
        _ => Answer::Policies(true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(counts: [u32; 6]) -> Vec<u8> {
        let mut datagram = request();
        datagram[4..6].copy_from_slice(&NEW_SPD_INFO.to_ne_bytes());
        datagram.extend(28_u16.to_ne_bytes());
        datagram.extend(XFRMA_SPD_INFO.to_ne_bytes());
        datagram.extend(counts.iter().flat_map(|count| count.to_ne_bytes()));
        datagram
    }

    #[test]
    fn policies_of_any_direction_count_and_those_of_sockets_do_not() {
        assert_eq!(answer(&info([0, 0, 0, 4, 4, 0])), Answer::Policies(false));
        for direction in 0..COUNTS {
            let mut counts = [0; 6];
            counts[direction] = 1;
            assert_eq!(answer(&info(counts)), Answer::Policies(true));
        }
    }

    #[test]
    fn messages_that_are_not_understood_count_as_policies() {
        assert_eq!(answer(&[]), Answer::Policies(true));
        assert_eq!(answer(&info([0; 6])[..30]), Answer::Policies(true));
    }

    #[test]
    fn a_refusal_is_reported() {
        let mut datagram = request();
        datagram[4..6].copy_from_slice(&NLMSG_ERROR.to_ne_bytes());
        datagram[HEADER_LEN..HEADER_LEN + 4].copy_from_slice(&(-libc::EINVAL).to_ne_bytes());
        assert_eq!(answer(&datagram), Answer::Refused(libc::EINVAL));
    }

    /// Needs root, like the agent.
    #[test]
    fn the_kernel_answers_each_time() {
        let mut policies = IpsecPolicies::default();
        let asked = [(); 3].map(|()| policies.are_any().unwrap());
        assert_eq!(asked, [IpsecPolicies::default().are_any().unwrap(); 3]);
    }
}
