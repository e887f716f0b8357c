//! `netattachctl completion`: completion of command lines in shells.

use clap::Args;
use clap_complete::{Shell, generate};

/// For which shell.
#[derive(Debug, Args)]
pub(super) struct Completion {
    /// bash: netattachctl completion bash > /etc/bash_completion.d/netattachctl
    shell: Shell,
}

impl Completion {
    pub(super) fn script(&self) -> String {
        let mut script = Vec::new();
        generate(self.shell, &mut super::command(), "netattachctl", &mut script);
        // Valid UTF-8: the script is generated from the command line's own words.
        String::from_utf8_lossy(&script).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shell_gets_every_command() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::Elvish, Shell::PowerShell] {
            let script = Completion { shell }.script();
            for command in super::super::command().get_subcommands() {
                assert!(script.contains(command.get_name()), "{shell}: {}", command.get_name());
            }
        }
    }
}
