//! Compiles the bench's own BPF program, which calls the measured ones, and generates its skeleton.

use std::path::PathBuf;

use libbpf_cargo::SkeletonBuilder;

fn main() {
    let here = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap());
    let source = here.join("bpf/fresh_packets.bpf.c");
    let headers = here.join("../../bpf");
    for path in [&source, &headers] {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    // Debian keeps asm/types.h in a directory of the architecture, which clang does not search for the BPF target.
    let architecture_headers = format!("/usr/include/{}-linux-gnu", std::env::var("CARGO_CFG_TARGET_ARCH").unwrap());
    let include = format!("-I{}", headers.display());
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap());
    SkeletonBuilder::new()
        .source(&source)
        .clang("clang-19")
        .clang_args(["-mcpu=v3", "-Wall", "-Wextra", "-Werror", &include, "-idirafter", &architecture_headers])
        .build_and_generate(out.join("fresh_packets.skel.rs"))
        .unwrap_or_else(|error| panic!("fresh_packets.bpf.c (needs the Debian package clang-19): {error:?}"));
}
