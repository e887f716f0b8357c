//! Writes the manual pages and the shell completions of the executables, from the definitions of their command lines, below a
//! directory: `cargo xtask release` runs it. It is no part of what is installed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Command, CommandFactory};
use clap_complete::{Shell, generate_to};

fn main() -> ExitCode {
    let Some(directory) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("netattach-manual DIR");
        return ExitCode::from(2);
    };
    match write(&directory) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("netattach-manual: {}: {error}", directory.display());
            ExitCode::FAILURE
        }
    }
}

fn write(directory: &Path) -> io::Result<()> {
    let commands =
        [(netattach::settings::Arguments::command(), 8), (netattach::cli::Arguments::command(), 1)];
    for (command, section) in commands {
        let pages = directory.join(format!("man/man{section}"));
        fs::create_dir_all(&pages)?;
        write_pages(command.clone(), section, None, &pages)?;
        for (shell, place) in [(Shell::Bash, "bash"), (Shell::Zsh, "zsh"), (Shell::Fish, "fish")] {
            let place = directory.join("completions").join(place);
            fs::create_dir_all(&place)?;
            let name = command.get_name().to_owned();
            generate_to(shell, &mut command.clone(), name, place)?;
        }
    }
    Ok(())
}

/// A page for a command, and one for each of its own: `netattachctl-status.1`.
fn write_pages(mut command: Command, section: u32, above: Option<&str>, directory: &Path) -> io::Result<()> {
    let name = above
        .map_or_else(|| command.get_name().to_owned(), |above| format!("{above}-{}", command.get_name()));
    // The words of the whole line, not only the last one.
    command = command.display_name(&name).disable_help_subcommand(true);
    command.build();
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        write_pages(below.clone(), section, Some(&name), directory)?;
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command)
        .title(name.to_uppercase())
        .section(section.to_string())
        // No date: the page is the same whenever it is written.
        .date("")
        .source(concat!("netattach ", env!("CARGO_PKG_VERSION")))
        .render(&mut page)?;
    fs::write(directory.join(format!("{name}.{section}")), page)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of a command and of all below it, each behind those above it.
    fn commands(command: &Command, above: &str) -> Vec<String> {
        let name = format!("{above}{}", command.get_name());
        let below = command.get_subcommands().filter(|below| !below.is_hide_set());
        let below: Vec<String> = below.flat_map(|below| commands(below, &format!("{name}-"))).collect();
        [vec![name], below].concat()
    }

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn every_command_has_a_page_and_nothing_else_has() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path()).unwrap();
        let mut expected: Vec<String> = commands(&netattach::cli::Arguments::command(), "")
            .into_iter()
            .map(|name| format!("{name}.1"))
            .collect();
        expected.sort();
        assert!(expected.len() > 15, "{expected:?}");
        let pages = directory.path().join("man/man1");
        assert_eq!(names(&pages), expected);
        assert_eq!(names(&directory.path().join("man/man8")), ["netattachd.8"]);
        for name in expected {
            let page = fs::read_to_string(pages.join(&name)).unwrap();
            let title = format!(".TH {} 1 ", name.trim_end_matches(".1").to_uppercase());
            let has = |text: &str| page.lines().any(|line| line.starts_with(text));
            assert!(has(&title) && has(".SH SYNOPSIS") && has(".SH DESCRIPTION"), "{name}:\n{page}");
        }
    }

    #[test]
    fn every_shell_has_its_completions() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path()).unwrap();
        let of = |shell: &str| names(&directory.path().join("completions").join(shell));
        assert_eq!(of("bash"), ["netattachctl.bash", "netattachd.bash"]);
        assert_eq!(of("zsh"), ["_netattachctl", "_netattachd"]);
        assert_eq!(of("fish"), ["netattachctl.fish", "netattachd.fish"]);
    }
}
