//! `cargo xtask bench`, which runs this executable: its arguments.

use std::num::NonZeroU16;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser};
#[cfg(feature = "cluster")]
use netattach_bench::cluster;
use netattach_bench::{Form, attach, dataplane, fairness, ports, restart, scale};
use xtask::progress;

#[derive(Parser)]
#[command(
    name = "cargo xtask bench",
    bin_name = "cargo xtask bench",
    about = "Measure netattach beside its alternatives"
)]
enum Subject {
    /// ADD and DEL of a pod with a bridge and two macvlans
    Attach(attach::Options),
    /// An agent that follows an API server: ADD, bursts, memory, policies across nodes, and their limits
    #[cfg(feature = "cluster")]
    Cluster(ClusterArguments),
    /// Traffic between two pods by path and by size of the policy, changes of policies, nanoseconds of a packet
    Dataplane(DataplaneArguments),
    /// ADD of a pod with a virtual function of a card, in the virtual machine that has one
    #[cfg(feature = "cluster")]
    Sriov(attach::vf::Options),
    /// ADD of a pod with an ipvlan, a VLAN or a dummy, in the virtual machine whose kernel has drivers for them
    KindsVm(attach::kinds::emulated::Options),
    /// How often the kernel's lock of links is taken for an ADD, in the virtual machine whose kernel counts that
    Locks(attach::locks::Options),
    /// Restart of an agent with many attachments
    Restart(restart::Options),
    /// ADD of a pod while others hang that have nothing to do with it
    Fairness(fairness::Options),
    /// ADD of a pod with a port of the node beside many that have ports
    Ports(ports::Options),
    /// ADD, DEL and the agent's share beside 10 to 1,000 attachments, bursts, and their limits
    Scale(scale::Options),
}

#[cfg(feature = "cluster")]
#[derive(Args)]
struct ClusterArguments {
    /// Pods attached one after another by each way
    #[arg(long, default_value = "60")]
    rounds: NonZeroU16,
    /// Bursts of pods attached at once by each way
    #[arg(long, default_value = "3")]
    bursts: NonZeroU16,
    /// Pods in a burst
    #[arg(long, default_value = "250")]
    burst_size: NonZeroU16,
    /// Pods of the node
    #[arg(long, default_value = "500")]
    pods: NonZeroU16,
    /// Pods of other nodes
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(1_000..=30_000))]
    peers: u32,
    /// Changes of pods of other nodes
    #[arg(long, default_value = "100", value_parser = changes)]
    changes: NonZeroU16,
    /// Seconds for which the idle agent is watched
    #[arg(long, default_value = "60")]
    idle: NonZeroU16,
    /// Definitions at last
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(200..))]
    definitions: u32,
    /// Fail if a limit is missed
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    form: Form,
}

#[derive(Args)]
struct DataplaneArguments {
    /// How often each path gets its turn
    #[arg(long, default_value = "7")]
    rounds: NonZeroU16,
    /// Length of one sample in milliseconds
    #[arg(long, default_value = "500")]
    sample: NonZeroU16,
    /// How often netattach and its floor take a sample of each kind one after the other
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u16).range(30..))]
    pairs: u16,
    /// Fail if a limit of the pairs is missed
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    form: Form,
    /// Measure only this; may be repeated
    #[arg(long, value_enum, value_name = "PART")]
    only: Vec<dataplane::Part>,
}

fn main() -> ExitCode {
    let outcome = match Subject::parse() {
        Subject::Attach(arguments) => attach::run(&arguments),
        #[cfg(feature = "cluster")]
        Subject::Cluster(arguments) => cluster::run(&arguments.into()),
        Subject::Dataplane(arguments) => dataplane::run(&arguments.into()),
        #[cfg(feature = "cluster")]
        Subject::Sriov(arguments) => attach::vf::run(&arguments),
        Subject::KindsVm(arguments) => attach::kinds::emulated::run(&arguments),
        Subject::Locks(arguments) => attach::locks::run(&arguments),
        Subject::Restart(arguments) => restart::run(&arguments),
        Subject::Fairness(arguments) => fairness::run(&arguments),
        Subject::Ports(arguments) => ports::run(&arguments),
        Subject::Scale(arguments) => scale::run(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            progress::failure(&error);
            ExitCode::FAILURE
        }
    }
}

/// Refuses more changes than there are peers of only their own policy.
#[cfg(feature = "cluster")]
fn changes(text: &str) -> Result<NonZeroU16, String> {
    let number: NonZeroU16 = text.parse().map_err(|_| "it is no number".to_owned())?;
    if number.get() > 900 { Err("at most 900".to_owned()) } else { Ok(number) }
}

#[cfg(feature = "cluster")]
impl From<ClusterArguments> for cluster::Options {
    fn from(arguments: ClusterArguments) -> Self {
        let ClusterArguments { rounds, bursts, burst_size, pods, peers, changes, definitions, .. } =
            arguments;
        let ClusterArguments { idle, check, form, .. } = arguments;
        let idle = Duration::from_secs(idle.get().into());
        Self { rounds, bursts, burst_size, pods, peers, changes, idle, definitions, check, form }
    }
}

impl From<DataplaneArguments> for dataplane::Options {
    fn from(arguments: DataplaneArguments) -> Self {
        let DataplaneArguments { rounds, sample, pairs, check, form, only } = arguments;
        Self { only, rounds, sample: Duration::from_millis(sample.get().into()), pairs, check, form }
    }
}
