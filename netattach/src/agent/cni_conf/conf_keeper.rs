//! Keeps the runtime's configuration file present, or absent before netattach is removed, and looks for
//! files that the runtime reads instead.

use std::time::Instant;

use super::conf_repair::{Became, InTheWay, Memory, Verdict, fight, in_the_way};
use super::file::{CniConf, CniConfError, Identity};
use crate::agent::health::note;
use crate::attach::conf_dir::ConfDir;
use crate::cni::load::as_runtimes_do;
use crate::cni::{CniError, ConfigError, NetworkList, PluginConf, code, multi_network};
use crate::error_chain::Chain;
use crate::rpc::message::Condition;
use crate::sync::{Mutex, locked};

/// How conditions name the file.
pub(in crate::agent) const OBJECT: &str = "CNI configuration";
/// Log message for a problem with the file.
pub(in crate::agent) const DISTURBED: &str = "the runtime's configuration is disturbed";
/// Most files in the way that are reported.
const MOST_IN_THE_WAY: usize = 4;

/// The keeper of the file.
#[derive(Debug)]
pub(in crate::agent) struct ConfKeeper {
    conf: CniConf,
    /// Locked while the file is checked and written: a disk may hang.
    state: Mutex<State>,
    /// Recent changes by other programs, and the files in the way.
    rows: Mutex<Vec<Condition>>,
}

#[derive(Debug, Default)]
struct State {
    memory: Memory,
    /// Identity of the file while it is present.
    identity: Option<Identity>,
    /// Whether files under former names were looked for: only an earlier agent leaves some.
    former_are_gone: bool,
}

impl ConfKeeper {
    pub(in crate::agent) fn new(conf: CniConf) -> Self {
        Self { conf, state: Mutex::default(), rows: Mutex::default() }
    }

    pub(in crate::agent) fn conf(&self) -> &CniConf {
        &self.conf
    }

    /// Returns the conditions of the file for an operator. Does not wait for the disk.
    pub(in crate::agent) fn rows(&self) -> Vec<Condition> {
        locked(&self.rows).clone()
    }

    /// Brings the file up to date for this default network. `None`: no default network can be attached, and
    /// the file stays as it is.
    ///
    /// # Errors
    /// Code 50 with the reason why the runtime does not call netattach by this file.
    pub(in crate::agent) fn keep(&self, default: Option<&NetworkList>) -> Result<String, CniError> {
        let mut state = locked(&self.state);
        let not_available = |msg: String| CniError::new(code::NOT_AVAILABLE, msg);
        let failed = |error: CniConfError| CniError::from_chain(code::NOT_AVAILABLE, &error);
        if self.conf.is_to_go() {
            let path = self.conf.path().display();
            for path in self.conf.remove().map_err(failed)? {
                let path = path.display();
                tracing::info!(%path, "configuration for the container runtime removed: new pods are not attached");
            }
            return Ok(format!("{path} is kept away by cniConf.remove: new pods are not attached"));
        }
        let names = self.conf.names().map_err(failed)?;
        let kept = match self.keep_file(&mut state, default, &names) {
            Ok(None) => Ok(()),
            Ok(Some(problem)) => Err(not_available(problem)),
            Err(error) => Err(failed(error)),
        };
        let in_the_way = self.in_the_way(names);
        let lately = state.memory.lately(Instant::now()).filter(|_| kept.is_ok());
        let lately =
            lately.map(|damage| format!("{}; it was written again", Became(self.conf.path(), damage)));
        let problems = kept.as_ref().err().map(|error| error.msg.clone()).into_iter();
        let problems = problems.chain(lately).chain(in_the_way.iter().cloned());
        let rows: Vec<Condition> =
            problems.map(|problem| Condition { object: OBJECT.to_owned(), problem }).collect();
        note(DISTURBED, &self.rows, rows);
        kept?;
        match in_the_way.into_iter().next() {
            Some(problem) => Err(not_available(problem)),
            None => Ok(self.conf.path().display().to_string()),
        }
    }

    /// Keeps the file only, without checking other files. Returns why it is not in order.
    fn keep_file(
        &self,
        state: &mut State,
        default: Option<&NetworkList>,
        names: &[String],
    ) -> Result<Option<String>, CniConfError> {
        let wanted = default.map(|default| self.conf.content(default));
        let Some(wanted) = wanted.or_else(|| state.memory.content().map(<[u8]>::to_vec)) else {
            return Ok(None);
        };
        let (conf, now) = (&self.conf, Instant::now());
        let found = conf.find(names, state.identity)?;
        let problem = match state.memory.judge(&found, &wanted, conf.repair(), now) {
            Verdict::InOrder => None,
            Verdict::Write => {
                conf.write(&wanted)?;
                tracing::info!(path = %conf.path().display(), "configuration for the container runtime written");
                None
            }
            Verdict::Repair(damage) => {
                conf.write(&wanted)?;
                state.memory.repaired(damage, now);
                None
            }
            Verdict::Wait(damage) => {
                Some(format!("{}; it is about to be written again", Became(conf.path(), &damage)))
            }
            Verdict::Fight(damage) => Some(fight(conf.path(), &damage)),
            Verdict::Report(damage) => Some(format!(
                "{}; cniConf.repair is report, so it is written again at the next start only",
                Became(conf.path(), &damage)
            )),
            Verdict::Foreign => return Err(conf.foreign()),
        };
        if problem.is_none() {
            state.identity = conf.identity();
            state.memory.in_order(wanted);
            // Only now: at each moment there is a file by which the runtime calls netattach. An agent that is killed
            // before this leaves it to the next one.
            if !state.former_are_gone {
                for path in conf.remove_former(names)? {
                    let path = path.display();
                    tracing::info!(%path, "configuration under a former cniConf.name removed");
                }
                state.former_are_gone = true;
            }
        }
        Ok(problem)
    }

    /// Returns the files that the runtime reads instead of ours.
    fn in_the_way(&self, names: Vec<String>) -> Vec<String> {
        let (ours, path) = (self.conf.name(), self.conf.directory());
        let before = ConfDir::of(path, names).before(&ours);
        let files = as_runtimes_do(&before).take(MOST_IN_THE_WAY);
        files.map(|(file, read)| in_the_way(&path.join(file), &ours, &kind(read))).collect()
    }
}

fn kind(read: Result<NetworkList, ConfigError>) -> InTheWay {
    match read {
        Err(error) => InTheWay::Unusable(Chain(&error).to_string()),
        Ok(list) => match multi_network::other(&list) {
            Some(product) => InTheWay::MultiNetwork(product),
            None => {
                InTheWay::Other(list.plugins.iter().map(PluginConf::plugin_type).map(str::to_owned).collect())
            }
        },
    }
}
