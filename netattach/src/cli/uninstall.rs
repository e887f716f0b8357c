//! `netattachctl uninstall`: takes netattach's pins off a node whose agent has ended for good.

use std::path::Path;

use super::{CliError, PATIENCE};
use crate::bpf::remove_all_pins;
use crate::rpc::client::{self, ClientError};
use crate::rpc::message::Request;

/// Removes the pins below `root` and says so.
///
/// # Errors
/// [`CliError::AgentRuns`] while an agent answers, and what could not be removed.
pub(super) fn run(socket: &Path, root: &Path) -> Result<String, CliError> {
    match client::call(socket, &Request::Status, PATIENCE) {
        Err(ClientError::Connect { .. }) => {}
        // Whatever it answers, somebody serves that socket.
        _ => return Err(CliError::AgentRuns(socket.to_owned())),
    }
    if !root.exists() {
        return Ok(format!("Nothing is pinned at {}.\n", root.display()));
    }
    remove_all_pins(root)?;
    Ok(format!(
        "Removed the programs and maps pinned at {}. Devices of pods that are still attached keep theirs until the \
         pods go.\n",
        root.display()
    ))
}
