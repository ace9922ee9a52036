//! The command `coreward`.

fn main() -> std::process::ExitCode {
    coreward::main()
}
