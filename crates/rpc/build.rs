//! Generates the services of `proto/coreward.proto`; `coreward-wire` has the messages.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=../wire/proto");
    let file_descriptors = protox::compile(["../wire/proto/coreward.proto"], ["../wire/proto"])?;
    tonic_prost_build::configure()
        .generate_default_stubs(true)
        .extern_path(".coreward.v1", "::coreward_wire::v1")
        .compile_fds(file_descriptors)?;
    Ok(())
}
