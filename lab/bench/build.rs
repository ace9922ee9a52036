//! Compiles the bench's BPF programs and generates their skeletons. The programs call the measured ones, or are the
//! baseline.

use std::path::PathBuf;

use libbpf_cargo::SkeletonBuilder;

fn main() {
    let here = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap());
    let headers = here.join("../../bpf");
    // Debian keeps asm/types.h in a directory of the architecture, which clang does not search for the BPF target.
    let architecture_headers = format!("/usr/include/{}-linux-gnu", std::env::var("CARGO_CFG_TARGET_ARCH").unwrap());
    let includes = [headers.clone(), headers.join("include")].map(|folder| format!("-I{}", folder.display()));
    let [folders, layouts] = &includes;
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap());
    for folder in [&headers, &here.join("bpf")] {
        println!("cargo::rerun-if-changed={}", folder.display());
    }
    // target/PROFILE/build/coreward-bench-HASH/out
    let profile = out.ancestors().nth(3).and_then(|directory| directory.file_name()).expect("cargo's directory");
    println!("cargo::rustc-env=COREWARD_PROFILE={}", profile.to_string_lossy());
    for name in
        ["generated_packets", "generated_segments", "live_frames", "units", "empty_reuseport", "empty_tracepoint"]
    {
        let source = here.join(format!("bpf/{name}.bpf.c"));
        SkeletonBuilder::new()
            .source(&source)
            .clang("clang-19")
            .clang_args([
                "-mcpu=v3",
                "-Wall",
                "-Wextra",
                "-Werror",
                folders,
                layouts,
                "-idirafter",
                &architecture_headers,
            ])
            .build_and_generate(out.join(format!("{name}.skel.rs")))
            .unwrap_or_else(|error| panic!("{name}.bpf.c (needs the Debian package clang-19): {error:?}"));
    }
}
