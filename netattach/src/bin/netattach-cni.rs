//! The native plugins as CNI executables: which one is decided by the name that it is started by.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use netattach::attach::standalone::copy::{Copied, copy_all};
use netattach::attach::standalone::install::{InstallError, Installed, install};
use netattach::attach::standalone::{is_answered, is_plugin, names, run};
use netattach::built;
use netattach::error_chain::Chain;
use netattach::rpc::shim;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os();
    let started_as = arguments.next().unwrap_or_default();
    let name = Path::new(&started_as).file_name().unwrap_or_default().to_string_lossy().into_owned();
    if is_answered(&name) {
        // A runtime can only read JSON: even a bug has to be told in it.
        std::panic::set_hook(Box::new(|panic| {
            let _ = io::stdout().write_all(shim::panic_text(panic).as_bytes());
            std::process::exit(1);
        }));
        let exit = run(&name, std::env::vars_os(), io::stdin().lock(), &mut io::stdout(), &mut io::stderr());
        return ExitCode::from(exit);
    }
    command(&arguments.collect::<Vec<OsString>>())
}

fn command(arguments: &[OsString]) -> ExitCode {
    let is_option = |word: &&OsString| word.as_encoded_bytes().starts_with(b"-");
    let (options, words): (Vec<&OsString>, Vec<&OsString>) = arguments.iter().partition(is_option);
    match (words.as_slice(), options.as_slice()) {
        ([verb, directory], options)
            if *verb == "install" && options.iter().all(|option| *option == "--force") =>
        {
            report(
                install_into(Path::new(directory), !options.is_empty())
                    .map_err(|error| Chain(&error).to_string()),
            )
        }
        ([verb, directory], options)
            if *verb == "install" && options.iter().any(|option| *option == "--copy") =>
        {
            match beside(options) {
                Some(beside) => report(copy_into(Path::new(directory), &beside)),
                None => wrong_words(),
            }
        }
        ([], []) => say(&mut io::stdout(), &usage()),
        ([], [option]) if *option == "--help" || *option == "-h" => say(&mut io::stdout(), &usage()),
        ([], [option]) if *option == "--version" || *option == "-V" => {
            say(&mut io::stdout(), &format!("netattach-cni {}\n", built::describe(&[])))
        }
        ([verb], []) if *verb == "help" => say(&mut io::stdout(), &usage()),
        _ => wrong_words(),
    }
}

fn wrong_words() -> ExitCode {
    say(&mut io::stderr(), &usage());
    // As argument parsers have it.
    ExitCode::from(2)
}

/// What stands beside `--copy`.
#[derive(Default)]
struct Beside<'o> {
    /// Plugins under names that others have too.
    also: Vec<&'o str>,
    /// Where the configuration for the runtime is written.
    conf_dir: Option<&'o Path>,
}

/// The options beside `--copy`; none if there is another.
fn beside<'o>(options: &[&'o OsString]) -> Option<Beside<'o>> {
    let mut found = Beside::default();
    for option in options.iter().filter(|option| **option != "--copy") {
        let option = option.to_str()?;
        match option.split_once('=')? {
            ("--also", names) => found.also.extend(names.split(',')),
            ("--conflist", directory) => found.conf_dir = Some(Path::new(directory)),
            _ => return None,
        }
    }
    found.also.iter().all(|name| is_plugin(name)).then_some(found)
}

fn copy_into(directory: &Path, beside: &Beside<'_>) -> Result<String, String> {
    let own = std::env::current_exe().map_err(|error| format!("find this executable: {error}"))?;
    let copied = copy_all(&own, directory, &beside.also, beside.conf_dir);
    let mut lines = String::new();
    for (path, became) in copied.map_err(|error| Chain(&error).to_string())? {
        let became = match became {
            Copied::Made => "installed",
            Copied::Was => "was there already",
            Copied::Replaced => "replaced, and the one before kept",
            Copied::Left => "left alone: the file belongs to another program",
        };
        lines += &format!("{}: {became}\n", path.display());
    }
    Ok(lines)
}

fn install_into(directory: &Path, force: bool) -> Result<String, InstallError> {
    let executable = std::env::current_exe()
        .map_err(|source| InstallError::Find { path: "/proc/self/exe".into(), source })?;
    let mut lines = String::new();
    for (name, became) in install(directory, &executable, names(), force)? {
        let became = match became {
            Installed::Made => "linked",
            Installed::Was => "was linked already",
            Installed::Replaced => "replaced",
            Installed::Left => "left alone: the file belongs to another program, which keeps state of pods",
        };
        lines += &format!("{}: {became}\n", directory.join(name).display());
    }
    Ok(lines)
}

fn report(outcome: Result<String, String>) -> ExitCode {
    match outcome {
        Ok(lines) => say(&mut io::stdout(), &lines),
        Err(error) => {
            say(&mut io::stderr(), &format!("netattach-cni: {error}\n"));
            ExitCode::FAILURE
        }
    }
}

fn usage() -> String {
    format!(
        "netattach-cni {}: netattach's own plugins as CNI executables, for any container runtime, without an agent

It acts as the plugin whose name it is started by: {}.

  netattach-cni install DIR [--force]   link these names in DIR, such as /opt/cni/bin;
                                        with --force in place of what has the names there, but for
                                        a sriov of another program
  netattach-cni install DIR --copy [--also=NAME,...] [--conflist=DIR]
                                        copy netattach and netattach-cni to DIR, from where this one is, each as a
                                        whole and only if it runs there; and this one under the names of plugins, such
                                        as loopback, where no other program has them; then write the configuration by
                                        which a runtime calls netattach, where the agent does not (cniConf.dir)
",
        env!("CARGO_PKG_VERSION"),
        names().collect::<Vec<_>>().join(", ")
    )
}

fn say(to: &mut impl Write, text: &str) -> ExitCode {
    // A closed output is the reader's choice.
    match to.write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
