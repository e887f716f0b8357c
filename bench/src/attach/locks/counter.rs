//! Counts how often the kernel's lock of links (`rtnl_mutex`) is taken, by any process on the machine, with probes of
//! the kernel (`perf_event_open(2)`, its `kprobe` PMU).
//!
//! Functions that take a lock have it as an argument, and a BPF program at their entry distinguishes this lock from
//! others. Probes of `rtnl_lock` itself would miss most calls: compilers inline it into the functions of its own
//! file, and so into the one that handles every request of the route netlink. A try counts, whatever its result.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, FromRawFd};

use anyhow::{Context, bail, ensure};
use xtask::progress::UserError;

use crate::bpf::Program;
use crate::netlink::{self, Netlink};

/// The number of the PMU.
const PMU: &str = "/sys/bus/event_source/devices/kprobe/type";
const SYMBOLS: &str = "/proc/kallsyms";
const PROCESSORS: &str = "/sys/devices/system/cpu/online";
/// The lock.
const LOCK: &str = "rtnl_mutex";
/// The functions that take a lock, which is their first argument. The first one is required; a kernel may lack some
/// of the others.
const FUNCTIONS: [&str; 4] =
    ["mutex_lock", "mutex_lock_killable", "mutex_lock_interruptible", "mutex_trylock"];

/// Requests of ioctl(2) on an event (`linux/perf_event.h`).
const ENABLE: libc::Ioctl = 0x2400;
const DISABLE: libc::Ioctl = 0x2401;
const SET_PROGRAM: libc::Ioctl = 0x4004_2408;

/// `struct perf_event_attr` up to `config2` (`PERF_ATTR_SIZE_VER1`).
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup: u32,
    breakpoint: u32,
    /// The address of the function's name, which ends with a zero byte.
    function: u64,
    /// Bytes behind the function's beginning.
    offset: u64,
}

/// An event for each function on each processor, all of them disabled.
pub(super) struct Counter(Vec<File>);

impl Counter {
    /// Opens the events, and checks that they count.
    ///
    /// # Errors
    /// Not root, or the kernel has no probes, does not reveal the address of the lock, or counts nothing.
    pub(super) fn open() -> anyhow::Result<Self> {
        let kind = probes()?;
        let symbols = fs::read_to_string(SYMBOLS).with_context(|| format!("read {SYMBOLS}"))?;
        let Some(lock) = address_of(LOCK, &symbols) else {
            bail!(UserError::new(
                format!(
                    "{SYMBOLS} does not say where {LOCK} is, by which the lock of links is told from others"
                ),
                "leave --here out: the virtual machine's kernel says it (`CONFIG_KALLSYMS_ALL`)",
            ));
        };
        let program = Program::that_counts(lock)?;
        let online = fs::read_to_string(PROCESSORS).with_context(|| format!("read {PROCESSORS}"))?;
        let online = processors(online.trim()).with_context(|| format!("read {PROCESSORS}: {online:?}"))?;
        let mut events = Vec::new();
        for (number, function) in FUNCTIONS.into_iter().enumerate() {
            if number > 0 && address_of(function, &symbols).is_none() {
                continue;
            }
            for processor in &online {
                let event = probe(kind, function, *processor)
                    .with_context(|| format!("probe {function} on processor {processor}"))?;
                let descriptor = program.as_fd().as_raw_fd();
                control(&event, SET_PROGRAM, descriptor).context("give a probe its program")?;
                events.push(event);
            }
        }
        let counter = Self(events);
        let ((), counted) = counter.during(|| Netlink::open()?.send(vec![netlink::set_up(1)]))?;
        ensure!(counted > 0, "a request that takes the lock of links is not counted");
        Ok(counter)
    }

    /// Runs work; returns its result, and how often the lock was taken meanwhile.
    pub(super) fn during<T>(&self, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<(T, u64)> {
        let before = self.count()?;
        self.tell(ENABLE)?;
        let done = work();
        self.tell(DISABLE)?;
        Ok((done?, self.count()?.saturating_sub(before)))
    }

    fn tell(&self, request: libc::Ioctl) -> anyhow::Result<()> {
        self.0.iter().try_for_each(|event| control(event, request, 0)).context("switch the probes")
    }

    fn count(&self) -> anyhow::Result<u64> {
        let mut sum = 0;
        for mut event in &self.0 {
            let mut count = [0; 8];
            event.read_exact(&mut count).context("read what a probe has counted")?;
            sum += u64::from_ne_bytes(count);
        }
        Ok(sum)
    }
}

/// Returns the number of the PMU for probes.
///
/// # Errors
/// The kernel has no such PMU.
pub(super) fn probes() -> anyhow::Result<u32> {
    match fs::read_to_string(PMU) {
        Ok(number) => number.trim().parse().with_context(|| format!("read {PMU}: {number:?}")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            bail!(UserError::new(
                "this kernel has no probes of its functions (no kprobe PMU, `CONFIG_KPROBE_EVENTS`)",
                "leave --here out: the virtual machine's kernel has them",
            ))
        }
        Err(error) => Err(error).with_context(|| format!("read {PMU}")),
    }
}

/// Opens an event, disabled, that counts the calls of a function on a processor, by any process.
fn probe(kind: u32, function: &str, processor: i32) -> anyhow::Result<File> {
    /// Any process.
    const ANY: libc::pid_t = -1;
    /// No other event's group.
    const NONE: libc::c_int = -1;
    /// `PERF_FLAG_FD_CLOEXEC`.
    const CLOSE_ON_EXEC: libc::c_ulong = 8;
    /// The lowest bit of the flags.
    const DISABLED: u64 = 1;
    let mut name = function.as_bytes().to_vec();
    name.push(0);
    let attributes = Attributes {
        kind,
        size: size_of::<Attributes>() as u32,
        flags: DISABLED,
        function: name.as_ptr() as u64,
        ..Attributes::default()
    };
    // SAFETY: the kernel reads the attributes, which have the size that they say, and the name, which ends with a zero byte; both
    // live through the call.
    let opened = unsafe {
        libc::syscall(libc::SYS_perf_event_open, &raw const attributes, ANY, processor, NONE, CLOSE_ON_EXEC)
    };
    match i32::try_from(opened) {
        // SAFETY: the kernel has just opened it for us.
        Ok(descriptor @ 0..) => Ok(unsafe { File::from_raw_fd(descriptor) }),
        _ => Err(io::Error::last_os_error()).context("open an event"),
    }
}

/// One request of ioctl(2) on an event.
fn control(event: &File, request: libc::Ioctl, argument: i32) -> io::Result<()> {
    // SAFETY: each of the requests made here takes a number, and reads and writes no memory.
    let done = unsafe { libc::ioctl(event.as_raw_fd(), request, libc::c_long::from(argument)) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns the address of a symbol of the kernel itself; a kernel that hides addresses shows 0.
fn address_of(symbol: &str, symbols: &str) -> Option<u64> {
    let address = symbols.lines().find_map(|line| {
        // A module's symbol is followed by the module's name.
        let mut words = line.split_whitespace();
        let (address, _kind, name, module) = (words.next()?, words.next()?, words.next()?, words.next());
        (name == symbol && module.is_none()).then_some(address)
    })?;
    u64::from_str_radix(address, 16).ok().filter(|address| *address > 0)
}

/// `0-1,3` as numbers.
fn processors(list: &str) -> Option<Vec<i32>> {
    let mut all = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        all.extend(first.parse::<i32>().ok()?..=last.parse::<i32>().ok()?);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_of_the_kernel_are_found_and_those_of_modules_are_not() {
        let symbols = "\
ffffffff81d188a0 T mutex_lock\n\
ffffffffc0000010 t rtnl_mutex\t[other]\n\
ffffffff82e02080 d rtnl_mutex\n\
0000000000000000 T mutex_trylock\n";
        assert_eq!(address_of("rtnl_mutex", symbols), Some(0xffff_ffff_82e0_2080));
        assert_eq!(address_of("mutex", symbols), None);
        assert_eq!(address_of("mutex_trylock", symbols), None, "it is not told");
    }

    #[test]
    fn processors_are_read_from_the_kernels_list() {
        assert_eq!(processors("0-2,5"), Some(vec![0, 1, 2, 5]));
        assert_eq!(processors("0"), Some(vec![0]));
        assert_eq!(processors("0-x"), None);
    }
}
