//! The node agent. See `netattach::agent`.

fn main() -> std::process::ExitCode {
    netattach::agent::main()
}
