//! Compiles the testbed's BPF programs, generates their skeletons, and compiles the library that injects faults into
//! daemons.

use std::path::PathBuf;
use std::process::Command;

use libbpf_cargo::SkeletonBuilder;

const PROGRAMS: [&str; 5] = ["rss_emulation", "xdp_pass", "receive_queues", "drop_counter", "access_port"];

fn main() {
    let here = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap());
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap());
    // target/PROFILE/build/coreward-testbed-HASH/out: the demo's text names the profile.
    let profile = out.ancestors().nth(3).and_then(|directory| directory.file_name()).expect("cargo's directory");
    println!("cargo::rustc-env=COREWARD_PROFILE={}", profile.to_string_lossy());
    let layouts = here.join("../../bpf");
    println!("cargo::rerun-if-changed={}", layouts.display());
    let includes = [layouts.clone(), layouts.join("include")].map(|folder| format!("-I{}", folder.display()));
    let [folders, layouts] = &includes;
    // Debian keeps asm/types.h in a directory of the architecture, which clang does not search for the BPF target.
    let architecture_headers = format!("/usr/include/{}-linux-gnu", std::env::var("CARGO_CFG_TARGET_ARCH").unwrap());
    for program in PROGRAMS {
        let source = here.join(format!("{program}.bpf.c"));
        println!("cargo::rerun-if-changed={}", source.display());
        SkeletonBuilder::new()
            .source(&source)
            .clang("clang-19")
            .clang_args([folders, layouts, "-idirafter", &architecture_headers, "-Wall", "-Werror"])
            .build_and_generate(out.join(format!("{program}.skel.rs")))
            .unwrap_or_else(|error| panic!("{program}.bpf.c (needs the Debian package clang-19): {error:?}"));
    }
    let preload = here.join("fault_shim.c");
    println!("cargo::rerun-if-changed={}", preload.display());
    let compiled = Command::new("gcc")
        .args(["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o"])
        .args([&out.join("preload.so"), &preload])
        .status();
    assert!(
        compiled.is_ok_and(|status| status.success()),
        "fault_shim.c was not compiled (needs the Debian package gcc)"
    );
}
