//! The settings of `netattachd`, from its command line and its configuration file.
//!
//! | module | what it does |
//! |---|---|
//! | `config` | the command line and the settings |
//! | `file` | reads the configuration file |
//! | `policies` | the settings about policies |
//! | `monitoring` | probes and metrics, the log, traces |
//! | `networks` | how the settings affect finding and planning networks |

mod config;
mod file;
mod monitoring;
mod networks;
mod policies;

pub use self::config::{
    Arguments, BpfLog, CheckFormat, CniConf, ConfRepair, Delegation, EstablishedOnChange, InvalidAnnotation,
    Kubernetes, Midstream, OtherMacvlans, Repair, Settings, SettingsError, StatusWrites,
};
pub use self::file::SettingsFileError;
pub(crate) use self::file::leaves;
pub(crate) use self::monitoring::unprobed;
pub use self::monitoring::{Endpoint, LogFormat, LogSettings, MetricsSettings, TracesSettings};
pub use self::policies::{AlwaysAllow, Overflow, PolicyTypes, WrittenCommonRules};
