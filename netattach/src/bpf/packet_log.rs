//! Log lines about packets from the stages of the packet path, written by an object that was built for this
//! (`cargo xtask build-ebpf --log`).

use std::fs;
use std::io;
use std::path::PathBuf;

use aya::Ebpf;
use aya::maps::{Array, MapData};
use aya_log::EbpfLogger;
use log::{Log, Metadata, Record};

use super::BpfError;
use super::object::{Object, identify};

/// The map with the number of the attachment whose packets are logged.
const OF: &str = "NA_LOG_OF";
/// Value in that map: every attachment.
const EVERY: u32 = u32::MAX;
/// Value in that map: no attachment.
const NONE: u32 = 0;
/// The map through which aya's macros log.
const LINES: &str = "AYA_LOGS";
/// Largest object that is read, in bytes. An object has some hundred thousand.
const MOST_BYTES: u64 = 16 << 20;

/// An object whose stages log, which replaces the embedded one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogObject {
    /// Path of the object.
    pub path: PathBuf,
    /// The level of detail.
    pub detail: Detail,
}

/// The level of detail. When the programs are loaded, the kernel removes the code for higher levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// The verdict.
    Verdicts,
    /// The result of every stage.
    Stages,
}

impl Detail {
    /// The value of the object's constant [`aya_log::LEVEL`].
    pub(super) fn level(self) -> u8 {
        match self {
            Self::Verdicts => aya_log::Level::Debug as u8,
            Self::Stages => aya_log::Level::Trace as u8,
        }
    }
}

impl LogObject {
    /// Reads the file.
    pub(super) fn read(&self) -> Result<Object, BpfError> {
        let failed = |source| BpfError::ReadObject { path: self.path.clone(), source };
        let length = fs::metadata(&self.path).map_err(failed)?.len();
        if length > MOST_BYTES {
            return Err(failed(io::Error::new(io::ErrorKind::FileTooLarge, "more than 16 MiB")));
        }
        let bytes = fs::read(&self.path).map_err(failed)?;
        // Leaked once in the lifetime of the process.
        identify(bytes.leak())
    }
}

/// The packets that are logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Followed {
    /// Packets of this attachment.
    Attachment(u32),
    /// Packets of all attachments.
    Every,
    /// No packets.
    Nobodys,
}

/// The log lines of the programs. No packet is logged until [`PacketLog::follow`]. After this value is
/// dropped, lines stay in the kernel's buffer of 128 KiB until the buffer is full; later lines are lost.
pub struct PacketLog {
    logger: EbpfLogger<Lines>,
    of: Array<MapData, u32>,
}

impl PacketLog {
    /// Takes over the loaded object. `say` is called for each line.
    pub(super) fn new(mut ebpf: Ebpf, say: impl Fn(&str) + Send + Sync + 'static) -> Result<Self, BpfError> {
        let of = ebpf.take_map(OF).ok_or(BpfError::NotLogging)?;
        let of = of.try_into().map_err(|source| BpfError::WriteMap { map: OF, source })?;
        let logger = EbpfLogger::init_with_logger(&mut ebpf, Lines(Box::new(say)))
            .map_err(|_| BpfError::NotLogging)?;
        Ok(Self { logger, of })
    }

    /// Sets which packets are logged from now on.
    pub fn follow(&mut self, whose: Followed) -> Result<(), BpfError> {
        let number = match whose {
            Followed::Attachment(number) => number,
            Followed::Every => EVERY,
            Followed::Nobodys => NONE,
        };
        self.of.set(0, number, 0).map_err(|source| BpfError::WriteMap { map: OF, source })
    }

    /// Passes on the lines that were written since the last call, until there are no more.
    pub fn flush(&mut self) {
        self.logger.flush();
    }
}

/// Whether an object logs.
pub(super) fn logs(ebpf: &Ebpf) -> bool {
    ebpf.map(LINES).is_some() && ebpf.map(OF).is_some()
}

/// The receiver of lines.
struct Lines(Box<dyn Fn(&str) + Send + Sync>);

impl Log for Lines {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        (self.0)(&record.args().to_string());
    }

    fn flush(&self) {}
}
