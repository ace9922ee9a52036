//! Compiles the testbed's BPF programs, generates their skeletons, and compiles the library that injects faults into
//! daemons.

use std::path::PathBuf;
use std::process::Command;

use libbpf_cargo::SkeletonBuilder;

const BPF_PROGRAM_NAMES: [&str; 5] = ["rss_emulation", "xdp_pass", "receive_queues", "drop_counter", "access_port"];

fn main() {
    let manifest_directory = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap());
    let output_directory = PathBuf::from(std::env::var_os("OUT_DIR").unwrap());
    // The output directory is target/PROFILE/build/coreward-testbed-HASH/out. The demo prints the profile's name.
    let profile_name =
        output_directory.ancestors().nth(3).and_then(|directory| directory.file_name()).expect("cargo's directory");
    println!("cargo::rustc-env=COREWARD_PROFILE={}", profile_name.to_string_lossy());
    let bpf_directory = manifest_directory.join("../../bpf");
    println!("cargo::rerun-if-changed={}", bpf_directory.display());
    let include_flags =
        [bpf_directory.clone(), bpf_directory.join("include")].map(|directory| format!("-I{}", directory.display()));
    let [bpf_flag, bpf_include_flag] = &include_flags;
    // Debian keeps asm/types.h in a directory of the architecture, which clang does not search for the BPF target.
    let architecture_include_path =
        format!("/usr/include/{}-linux-gnu", std::env::var("CARGO_CFG_TARGET_ARCH").unwrap());
    for program in BPF_PROGRAM_NAMES {
        let bpf_source_path = manifest_directory.join(format!("{program}.bpf.c"));
        println!("cargo::rerun-if-changed={}", bpf_source_path.display());
        SkeletonBuilder::new()
            .source(&bpf_source_path)
            .clang("clang-19")
            .clang_args([bpf_flag, bpf_include_flag, "-idirafter", &architecture_include_path, "-Wall", "-Werror"])
            .build_and_generate(output_directory.join(format!("{program}.skel.rs")))
            .unwrap_or_else(|error| panic!("{program}.bpf.c (needs the Debian package clang-19): {error:?}"));
    }
    let fault_shim_source_path = manifest_directory.join("fault_shim.c");
    println!("cargo::rerun-if-changed={}", fault_shim_source_path.display());
    let gcc_status = Command::new("gcc")
        .args(["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o"])
        .args([&output_directory.join("preload.so"), &fault_shim_source_path])
        .status();
    assert!(
        gcc_status.is_ok_and(|status| status.success()),
        "fault_shim.c was not compiled (needs the Debian package gcc)"
    );
}
