//! Compiles the bench's BPF programs, which either call the measured programs or are baselines, and generates their
//! skeletons.

use std::path::PathBuf;

use libbpf_cargo::SkeletonBuilder;

fn main() {
    let crate_directory = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap());
    let bpf_directory = crate_directory.join("../../bpf");
    // Debian keeps asm/types.h in an architecture's directory, which clang does not search for the BPF target.
    let architecture_headers = format!("/usr/include/{}-linux-gnu", std::env::var("CARGO_CFG_TARGET_ARCH").unwrap());
    let include_options =
        [bpf_directory.clone(), bpf_directory.join("include")].map(|directory| format!("-I{}", directory.display()));
    let [bpf_flag, bpf_include_flag] = &include_options;
    let out_directory = PathBuf::from(std::env::var_os("OUT_DIR").unwrap());
    for directory in [&bpf_directory, &crate_directory.join("bpf")] {
        println!("cargo::rerun-if-changed={}", directory.display());
    }
    // OUT_DIR is target/PROFILE/build/coreward-bench-HASH/out.
    let cargo_profile =
        out_directory.ancestors().nth(3).and_then(|directory| directory.file_name()).expect("cargo's directory");
    println!("cargo::rustc-env=COREWARD_PROFILE={}", cargo_profile.to_string_lossy());
    for name in
        ["generated_packets", "generated_segments", "live_frames", "units", "empty_reuseport", "empty_tracepoint"]
    {
        let source_path = crate_directory.join(format!("bpf/{name}.bpf.c"));
        SkeletonBuilder::new()
            .source(&source_path)
            .clang("clang-19")
            .clang_args([
                "-mcpu=v3",
                "-Wall",
                "-Wextra",
                "-Werror",
                bpf_flag,
                bpf_include_flag,
                "-idirafter",
                &architecture_headers,
            ])
            .build_and_generate(out_directory.join(format!("{name}.skel.rs")))
            .unwrap_or_else(|error| panic!("{name}.bpf.c (needs the Debian package clang-19): {error:?}"));
    }
}
