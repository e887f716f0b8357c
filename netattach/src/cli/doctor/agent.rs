//! Checks whether the agent answers, which conditions it lacks and which problems it reports; finds its settings.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::Parser;

use super::super::{CliError, ask};
use super::{Check, shown};
use crate::error_chain::Chain;
use crate::rpc::message::{Condition, FlowTableUse, Request, Response};
use crate::settings::{Arguments, Settings};

/// Most problems that are shown one by one.
const MOST_PROBLEMS: usize = 50;

/// The settings on which the checks are based.
pub(super) struct Known {
    pub(super) settings: Settings,
    /// The origin of the settings, or the error in them.
    pub(super) check: Check,
    /// Whether the settings are those of an agent with its own mount namespace, as in a pod.
    pub(super) is_apart: bool,
}

/// Returns the settings of the file, otherwise of the agent that runs on this node, otherwise the built-in ones.
pub(super) fn settings(config: Option<&Path>) -> Known {
    if let Some(path) = config {
        let arguments = Arguments { config: Some(path.to_owned()), ..Arguments::default() };
        return read(arguments, &path.display().to_string(), "");
    }
    match running(Path::new("/proc")) {
        Some((pid, arguments)) => of_process(pid, arguments),
        None => built_in("as no netattachd runs here"),
    }
}

const SETTINGS: &str = "settings";

fn read(arguments: Arguments, of: &str, note: &str) -> Known {
    let (settings, check) = match Settings::read(arguments) {
        Ok(settings) => {
            let detail = format!("{of}: {}{note}", shown(&settings));
            (settings, Check::ok(SETTINGS, detail))
        }
        Err(error) => {
            let remedy = "correct the settings: the agent does not start with them; the rest was checked with the defaults";
            (Settings::default(), Check::failed(SETTINGS, format!("{of}: {}", Chain(&error)), remedy))
        }
    };
    Known { settings, check, is_apart: false }
}

fn built_in(why: &str) -> Known {
    let settings = Settings::default();
    let detail = format!("the built-in ones ({}), {why}", shown(&settings));
    Known { settings, check: Check::skipped(SETTINGS, detail), is_apart: false }
}

/// Returns the settings of a running agent, with paths resolved as in that process.
fn of_process(pid: u32, arguments: Arguments) -> Known {
    let of = format!("of netattachd, process {pid}");
    match as_it_sees(Path::new(&format!("/proc/{pid}")), arguments) {
        Ok((arguments, false)) => read(arguments, &of, ""),
        Ok((arguments, true)) => {
            let note = ", in its own mount namespace: directories that differ from the node's at the same paths are checked only in the agent's pod";
            Known { is_apart: true, ..read(arguments, &of, note) }
        }
        Err(error) => built_in(&format!("as those {of} cannot be read in its own mount namespace: {error}")),
    }
}

/// Returns the command line of a process, with the path of its settings file such that this process can open the
/// file, and whether that process has its own mount namespace.
fn as_it_sees(process: &Path, mut arguments: Arguments) -> io::Result<(Arguments, bool)> {
    let mounts = |of: &Path| std::fs::metadata(of.join("ns/mnt")).map(|found| found.ino());
    let apart = mounts(process)? != mounts(Path::new("/proc/self"))?;
    if let Some(path) = arguments.config.take() {
        let is_ours = path.is_absolute() && !apart;
        arguments.config = Some(if is_ours { path } else { found_by(process, &path)? });
    }
    Ok((arguments, apart))
}

/// Returns the path at which this process finds the file that another process has at `path`.
fn found_by(process: &Path, path: &Path) -> io::Result<PathBuf> {
    let (directory, inside) = match path.strip_prefix("/") {
        Ok(inside) => ("root", inside),
        Err(_) => ("cwd", path),
    };
    let directory = process.join(directory);
    std::fs::metadata(&directory)?;
    Ok(directory.join(inside))
}

/// Finds the agent among the visible processes; returns its pid and its command line.
fn running(processes: &Path) -> Option<(u32, Arguments)> {
    let this = processes.join("self");
    std::fs::read_dir(processes).ok()?.flatten().find_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let words = words(&entry.path())?;
        let executable = PathBuf::from(words.first()?);
        if executable.file_name()? != "netattachd" || !may_be_an_agent(&entry.path(), &this) {
            return None;
        }
        // The paths are those of the agent's mount namespace.
        let arguments = Arguments::try_parse_from(words).ok()?;
        Some((pid, arguments))
    })
}

/// Whether a process is root's and in this process's network and user namespaces, as the agent is, whatever its
/// mounts. In a pod, any process can have that name, and name directories of the node. Of a process that may not be
/// inspected, nothing is read later either.
fn may_be_an_agent(process: &Path, this: &Path) -> bool {
    let is_same = |name: &str| -> io::Result<bool> {
        let [its, ours] = [process, this].map(|of| std::fs::metadata(of.join("ns").join(name)));
        let (its, ours) = (its?, ours?);
        Ok((its.dev(), its.ino()) == (ours.dev(), ours.ino()))
    };
    let same = is_same("net").and_then(|same| Ok(same && is_same("user")?));
    is_roots(process) && same.unwrap_or_else(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

/// Whether a process is root's, by its status: a process itself determines the owner of its files in `/proc`.
fn is_roots(process: &Path) -> bool {
    let status = crate::bounded::read(&process.join("status"), 64 << 10).unwrap_or_default();
    let status = String::from_utf8_lossy(&status);
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    users.is_some_and(|users| users.split_whitespace().all(|user| user == "0"))
}

fn words(process: &Path) -> Option<Vec<OsString>> {
    let line = crate::bounded::read(&process.join("cmdline"), 64 << 10).ok()?;
    let line = line.strip_suffix(&[0]).unwrap_or(&line);
    Some(line.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec())).collect())
}

/// Returns the checks of what the agent reports about itself.
pub(super) fn checks(socket: &Path) -> Vec<Check> {
    let status = match ask(socket, &Request::Status) {
        Ok(Response::Status(status)) => status,
        Ok(_) => return vec![Check::failed("agent", "it answered another question", VERSIONS)],
        Err(error) => return vec![absent(&error)],
    };
    let mut checks = vec![match status.version.as_str() {
        version if version == env!("CARGO_PKG_VERSION") => {
            Check::ok("agent", format!("netattachd {version} answers, {} attachments", status.attachments))
        }
        version => Check::warning(
            "agent",
            format!("netattachd {version} answers, this is netattachctl {}", env!("CARGO_PKG_VERSION")),
            VERSIONS,
        ),
    }];
    for ready in &status.ready {
        let detail = format!("{}: {}", ready.condition, ready.detail);
        checks.push(match ready.met {
            true => Check::ok("readiness", detail),
            false => Check::failed("readiness", detail, remedy_of(&ready.condition)),
        });
    }
    checks.extend(status.flows.iter().filter_map(nearly_full));
    let problems: Vec<&Condition> = status.source.iter().chain(&status.troubles).collect();
    checks.extend(problems.iter().take(MOST_PROBLEMS).map(|Condition { object, problem }| {
        Check::warning(
            "objects",
            format!("{object}: {problem}"),
            "docs/troubleshooting.md has the causes by message",
        )
    }));
    if problems.len() > MOST_PROBLEMS {
        let more = problems.len() - MOST_PROBLEMS;
        checks.push(Check::warning(
            "objects",
            format!("{more} more problems"),
            "netattachctl status shows all",
        ));
    }
    checks
}

/// Returns a warning for a map of the flow table that has little room left. The map's size is fixed: it helps to know
/// which attachments fill it.
fn nearly_full(flows: &FlowTableUse) -> Option<Check> {
    let FlowTableUse { family, entries, capacity } = flows;
    let remedy = "netattachctl stats -o wide shows whose flows they are (FLOWS) and whose make room for newer ones (DISPLACED); \
                  docs/configuration.md#the-flow-table has what each attachment may have";
    (entries * 10 >= capacity * 9).then(|| {
        Check::warning(
            "flow table",
            format!("the table of {family} flows has {entries} of {capacity}"),
            remedy,
        )
    })
}

const VERSIONS: &str = "install netattachd and netattachctl from one release";

fn absent(error: &CliError) -> Check {
    let remedy = "start netattachd, and give --socket if its runDir is another; its log says why it ended. Attached pods \
                  keep working meanwhile, and no pod can be attached";
    Check::failed("agent", Chain(error).to_string(), remedy)
}

/// Returns the remedy for an unmet condition.
fn remedy_of(condition: &str) -> &'static str {
    match condition {
        "source" => {
            "see that the API server can be reached and the agent may read (check: cluster access), or that the directory of manifests is there"
        }
        "API server" => {
            "see that the API server can be reached from this node and the agent may read (check: cluster access); pods that are known are attached meanwhile"
        }
        "sockets" => {
            "find out which program removes files from runDir, and check that it is writable; the agent recreates its socket within seconds"
        }
        "journal" => "free space on, or make writable, the file system of stateDir",
        "descriptors" => {
            "raise the limit of open files of the agent (LimitNOFILE of its unit, or in a pod of the container runtime's unit)"
        }
        "dataplane" => "restart netattachd: it loads what is missing, and attachments keep working",
        "default network" => {
            "define the network that defaultNetwork names, with a parent and plugins that exist on this node"
        }
        "CNI configuration" => {
            "see that cniConf.dir is writable and has room, that no other program's file is in the way there, and that the default network can be attached (docs/primary-networks.md)"
        }
        _ => "docs/troubleshooting.md has the causes by message",
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::super::State;
    use super::*;

    /// A process that is killed when this is dropped.
    struct Process(Child);

    impl Drop for Process {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn the_file_that_a_process_names_is_looked_for_where_that_process_is() {
        let directory = tempfile::tempdir().unwrap();
        let text = format!("source: {0}\nstateDir: {0}/state\n", directory.path().display());
        std::fs::write(directory.path().join("x.yaml"), text).unwrap();
        let mut command = Command::new("sleep");
        let process = Process(command.arg("600").current_dir(directory.path()).spawn().unwrap());
        let of = |config: &str, pid: u32| {
            of_process(pid, Arguments { config: Some(config.into()), ..Arguments::default() })
        };
        // As if the doctor were called in another directory.
        let Known { settings, check, is_apart } = of("./x.yaml", process.0.id());
        assert!(!is_apart);
        assert_eq!(settings.state_dir, directory.path().join("state"), "{check:?}");
        assert_eq!(check.state, State::Ok);
        let absolute = directory.path().join("x.yaml");
        assert_eq!(of(absolute.to_str().unwrap(), process.0.id()).settings.state_dir, settings.state_dir);
        // No process has this pid: a process that cannot be inspected is no failure of the agent's settings.
        let Known { settings, check, .. } = of("./x.yaml", u32::MAX);
        assert_eq!((settings, check.state), (Settings::default(), State::Skipped));
    }

    #[test]
    fn the_file_of_a_process_with_mounts_of_its_own_is_in_its_root_directory() {
        let directory = tempfile::tempdir().unwrap();
        let process = directory.path().join("700");
        for name in ["ns", "root", "cwd"] {
            std::fs::create_dir_all(process.join(name)).unwrap();
        }
        // Any other file stands for another namespace.
        std::fs::write(process.join("ns/mnt"), "").unwrap();
        let seen = |config: &str| {
            let arguments = Arguments { config: Some(config.into()), ..Arguments::default() };
            let (arguments, apart) = as_it_sees(&process, arguments).unwrap();
            (arguments.config.unwrap(), apart)
        };
        let inside = process.join("root/etc/netattach/config.yaml");
        assert_eq!(seen("/etc/netattach/config.yaml"), (inside, true));
        assert_eq!(seen("x.yaml"), (process.join("cwd/x.yaml"), true));
        std::fs::remove_dir(process.join("root")).unwrap();
        let arguments = Arguments { config: Some("/etc/x.yaml".into()), ..Arguments::default() };
        assert_eq!(as_it_sees(&process, arguments).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_pods_process_of_the_agents_name_is_not_taken_for_it() {
        let processes = tempfile::tempdir().unwrap();
        let path = |name: &str| processes.path().join(name);
        let process = |name: &str, [net, user]: [&str; 2], owner: &str| {
            std::fs::create_dir_all(path(name).join("ns")).unwrap();
            for (kind, namespace) in [("net", net), ("user", user)] {
                let file = path(namespace);
                if !file.exists() {
                    std::fs::write(&file, "").unwrap();
                }
                std::fs::hard_link(file, path(name).join("ns").join(kind)).unwrap();
            }
            let words = ["/usr/bin/netattachd", "--source", name].map(|word| format!("{word}\0")).concat();
            std::fs::write(path(name).join("cmdline"), words).unwrap();
            std::fs::write(path(name).join("status"), format!("Name:\tx\nUid:\t{owner}\nGid:\t0\n")).unwrap();
        };
        process("self", ["net-node", "user-node"], "0\t0\t0\t0");
        let found = || running(processes.path()).map(|(pid, arguments)| (pid, arguments.source));
        process("700", ["net-pod", "user-node"], "0\t0\t0\t0");
        process("701", ["net-node", "user-pod"], "0\t0\t0\t0");
        process("702", ["net-node", "user-node"], "1000\t0\t0\t0");
        assert_eq!(found(), None);
        process("703", ["net-node", "user-node"], "0\t0\t0\t0");
        assert_eq!(found(), Some((703, Some("703".into()))));
    }

    #[test]
    fn a_flow_table_is_told_of_from_nine_tenths_on() {
        let table = |entries| FlowTableUse { family: "IPv6".to_owned(), entries, capacity: 100 };
        assert_eq!(nearly_full(&table(89)), None);
        let expected = Check::warning(
            "flow table",
            "the table of IPv6 flows has 90 of 100",
            "netattachctl stats -o wide shows whose flows they are (FLOWS) and whose make room for newer ones (DISPLACED); \
             docs/configuration.md#the-flow-table has what each attachment may have",
        );
        assert_eq!(nearly_full(&table(90)), Some(expected));
    }
}
