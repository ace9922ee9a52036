//! The executable `coreward`.

fn main() -> std::process::ExitCode {
    coreward::main()
}
