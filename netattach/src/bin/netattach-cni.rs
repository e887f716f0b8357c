//! The native plugins as CNI executables: which one is decided by the name that it is started by.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use netattach::attach::standalone::install::{InstallError, Installed, install};
use netattach::attach::standalone::{is_plugin, names, run};
use netattach::error_chain::Chain;
use netattach::rpc::shim;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os();
    let started_as = arguments.next().unwrap_or_default();
    let name = Path::new(&started_as).file_name().unwrap_or_default().to_string_lossy().into_owned();
    if is_plugin(&name) {
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
            report(install_into(Path::new(directory), !options.is_empty()))
        }
        ([], []) => say(&mut io::stdout(), &usage()),
        ([], [option]) if *option == "--help" || *option == "-h" => say(&mut io::stdout(), &usage()),
        ([], [option]) if *option == "--version" || *option == "-V" => {
            say(&mut io::stdout(), &format!("netattach-cni {}\n", env!("CARGO_PKG_VERSION")))
        }
        ([verb], []) if *verb == "help" => say(&mut io::stdout(), &usage()),
        _ => {
            say(&mut io::stderr(), &usage());
            // As argument parsers have it.
            ExitCode::from(2)
        }
    }
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
        };
        lines += &format!("{}: {became}\n", directory.join(name).display());
    }
    Ok(lines)
}

fn report(outcome: Result<String, InstallError>) -> ExitCode {
    match outcome {
        Ok(lines) => say(&mut io::stdout(), &lines),
        Err(error) => {
            say(&mut io::stderr(), &format!("netattach-cni: {}\n", Chain(&error)));
            ExitCode::FAILURE
        }
    }
}

fn usage() -> String {
    format!(
        "netattach-cni {}: netattach's own plugins as CNI executables, for any container runtime, without an agent

It acts as the plugin whose name it is started by: {}.

  netattach-cni install DIR [--force]   link these names in DIR, such as /opt/cni/bin;
                                        with --force in place of what has the names there
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
