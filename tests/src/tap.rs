//! The process's end of a tap.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use netattach::netlink::Handle;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use crate::Namespace;
use crate::traffic::stretched;

/// Flags of `TUNSETIFF` (`linux/if_tun.h`): a tap, without a header before each frame.
const TAP: u16 = 0x0002 | 0x1000;
const MULTI_QUEUE: u16 = 0x0100;

/// An open tap, as a virtual machine has it. It has a carrier while this exists.
#[derive(Debug)]
pub struct TapEnd(File);

impl TapEnd {
    /// Opens a tap that is there.
    ///
    /// # Errors
    /// The kernel refuses, or the interface is down.
    pub fn open(namespace: &Namespace, name: &str, several_queues: bool) -> Result<Self> {
        let file = namespace.run(|| OpenOptions::new().read(true).write(true).open("/dev/net/tun"))?;
        ensure!(name.len() < libc::IFNAMSIZ, "{name} is too long");
        let mut request = [0_u8; 40];
        request[..name.len()].copy_from_slice(name.as_bytes());
        let flags = if several_queues { TAP | MULTI_QUEUE } else { TAP };
        request[16..18].copy_from_slice(&flags.to_ne_bytes());
        // SAFETY: `request` has the size and the layout of a `struct ifreq`: a name of 16 bytes, then flags.
        let done = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, request.as_mut_ptr()) };
        ensure!(done == 0, "open tap {name}: {}", std::io::Error::last_os_error());
        let mut handle = Handle::open_in(namespace.netns())?;
        let index = handle.link(name)?.index;
        ensure!(handle.await_carrier(index)?, "{name} has no carrier");
        Ok(Self(file))
    }

    /// Sends a frame to the interface.
    ///
    /// # Errors
    /// The interface is down.
    pub fn send(&self, frame: &[u8]) -> Result<()> {
        let sent = (&self.0).write(frame).context("send by the tap")?;
        ensure!(sent == frame.len(), "{sent} of {} bytes were sent", frame.len());
        Ok(())
    }

    /// The next frame that the interface sends for which `is_wanted` holds; `None` if none comes in that time.
    ///
    /// # Errors
    /// The tap cannot be read.
    pub fn receive(&self, patience: Duration, is_wanted: impl Fn(&[u8]) -> bool) -> Result<Option<Vec<u8>>> {
        let end = Instant::now() + stretched(patience);
        let mut frame = [0; 65536];
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).context("a time")?;
            if poll(&mut [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)], Some(&left))? == 0 {
                return Ok(None);
            }
            let length = (&self.0).read(&mut frame).context("receive from the tap")?;
            if is_wanted(&frame[..length]) {
                return Ok(Some(frame[..length].to_vec()));
            }
        }
    }
}
