//! A listening socket for several threads, each of which sleeps until a client connects or the listener is
//! closed.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags};

/// A listening socket that can be closed without losing the connections in its queue.
#[derive(Debug)]
pub(super) struct Door {
    socket: OwnedFd,
    /// An eventfd that is readable once the listener is closed.
    closed: OwnedFd,
}

/// The epoll instance on which one thread sleeps.
#[derive(Debug)]
pub(super) struct Doorstep(OwnedFd);

/// Why a thread woke.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Woken {
    /// A client may have connected.
    Connection,
    /// The listener is closed. Connections may be left in its queue.
    Closed,
}

const CONNECTION: u64 = 0;
const CLOSED: u64 = 1;

impl Door {
    /// `socket` listens and is non-blocking.
    ///
    /// # Errors
    /// The kernel's error, for lack of descriptors or memory.
    pub(super) fn of(socket: OwnedFd) -> io::Result<Self> {
        Ok(Self { socket, closed: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)? })
    }

    /// Creates an epoll instance for one more thread. The kernel wakes one thread for a connection, not all
    /// (`EPOLLEXCLUSIVE`).
    ///
    /// # Errors
    /// As [`Door::of`].
    pub(super) fn step(&self) -> io::Result<Doorstep> {
        let step = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let connection = epoll::EventData::new_u64(CONNECTION);
        epoll::add(&step, &self.socket, connection, epoll::EventFlags::IN | epoll::EventFlags::EXCLUSIVE)?;
        epoll::add(&step, &self.closed, epoll::EventData::new_u64(CLOSED), epoll::EventFlags::IN)?;
        Ok(Doorstep(step))
    }

    /// Accepts the next connection in the queue. `None`: the queue is empty, or another thread was faster.
    ///
    /// # Errors
    /// The kernel's error, usually for lack of descriptors.
    pub(super) fn accept(&self) -> io::Result<Option<UnixStream>> {
        loop {
            match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(stream) => return Ok(Some(stream.into())),
                // `EINVAL`: the listener is closed and its queue is empty.
                Err(Errno::AGAIN | Errno::INVAL) => return Ok(None),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Refuses further connections, and wakes all threads. Queued connections can still be accepted: a
    /// listening socket that is shut down keeps its queue (`unix_stream_connect` and `unix_accept` in
    /// net/unix/af_unix.c).
    ///
    /// # Errors
    /// The kernel's error; no case is known.
    pub(super) fn close(&self) -> io::Result<()> {
        let ended = rustix::net::shutdown(&self.socket, Shutdown::Read);
        // Written even if shutdown(2) failed: the agent waits for these threads when it ends.
        rustix::io::write(&self.closed, &1_u64.to_ne_bytes())?;
        Ok(ended?)
    }
}

impl Doorstep {
    /// Sleeps until a client connects or the listener is closed.
    ///
    /// # Errors
    /// The kernel's error; no case is known.
    pub(super) fn sleep(&self) -> io::Result<Woken> {
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 2];
        loop {
            match epoll::wait(&self.0, &mut events, None) {
                Ok((events, _)) => {
                    let is_closed = events.iter().any(|event| event.data.u64() == CLOSED);
                    return Ok(if is_closed { Woken::Closed } else { Woken::Connection });
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
#[cfg(not(feature = "model"))]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_connection_wakes_a_thread_and_the_end_all_of_them() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let door = Door::of(listener.into()).unwrap();
        let (accepted, woken) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        let step = door.step().unwrap();
                        let mut held = Vec::new();
                        loop {
                            let why = step.sleep().unwrap();
                            woken.fetch_add(1, Ordering::SeqCst);
                            while let Some(stream) = door.accept().unwrap() {
                                accepted.fetch_add(1, Ordering::SeqCst);
                                held.push(stream);
                            }
                            if why == Woken::Closed {
                                return;
                            }
                        }
                    })
                })
                .collect();
            let clients: Vec<_> = (1..=10)
                .map(|number| {
                    let client = UnixStream::connect(&path).unwrap();
                    while accepted.load(Ordering::SeqCst) < number {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    client
                })
                .collect();
            assert!(threads.iter().all(|thread| !thread.is_finished()));
            door.close().unwrap();
            assert!(UnixStream::connect(&path).is_err());
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            drop(clients);
        });
        assert_eq!(accepted.into_inner(), 10);
        assert!(woken.into_inner() >= 13);
    }

    #[test]
    fn who_had_connected_before_the_end_is_accepted_after_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let door = Door::of(listener.into()).unwrap();
        let clients = [(); 2].map(|()| UnixStream::connect(&path).unwrap());
        door.close().unwrap();
        assert_eq!(door.step().unwrap().sleep().unwrap(), Woken::Closed);
        assert!(door.accept().unwrap().is_some() && door.accept().unwrap().is_some());
        assert!(door.accept().unwrap().is_none());
        drop(clients);
    }
}
