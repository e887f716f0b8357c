//! The node agent with the crash points that `tests/crash.rs` enumerates: this crate enables the feature, the
//! executables that are shipped are built without it.

fn main() -> std::process::ExitCode {
    netattach::agent::main()
}
