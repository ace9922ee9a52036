//! Compiles `proto/coreward.proto` and `proto/fleet.proto` with protox, so that no protoc has to be installed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(["proto/coreward.proto"], ["proto"])?;
    // As `Bytes`, an encoded table is shared by all streams that send it, and the numbers from racks are read in place.
    let zero_copy_messages = [".coreward.v1.DataplaneUpdate", ".coreward.v1.LoadSpread", ".coreward.v1.CandidateList"];
    // The services are generated in crates/rpc.
    let messages = tonic_prost_build::configure().build_client(false).build_server(false);
    zero_copy_messages.into_iter().fold(messages, |builder, path| builder.bytes(path)).compile_fds(descriptors)?;
    Ok(())
}
