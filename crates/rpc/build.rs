//! Generates the gRPC services of `proto/coreward.proto`, whose messages are in `coreward-wire`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=../wire/proto");
    let file_descriptors = protox::compile(["../wire/proto/coreward.proto"], ["../wire/proto"])?;
    tonic_prost_build::configure()
        .generate_default_stubs(true)
        .extern_path(".coreward.v1", "::coreward_wire::v1")
        .compile_fds(file_descriptors)?;
    Ok(())
}
