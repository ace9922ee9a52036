fn main() -> std::process::ExitCode {
    coreward::main()
}
