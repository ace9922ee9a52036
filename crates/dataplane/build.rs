//! Compiles every `bpf/*.bpf.c` and generates its skeleton: `skeleton::<file name>` in the crate. A new file there needs
//! no change here.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use libbpf_cargo::SkeletonBuilder;

fn main() {
    let sources = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("../../bpf");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap());
    println!("cargo::rerun-if-changed={}", sources.display());
    let mut names: Vec<String> = std::fs::read_dir(&sources)
        .unwrap_or_else(|error| panic!("{}: {error}", sources.display()))
        .filter_map(|entry| entry.unwrap().file_name().to_str()?.strip_suffix(".bpf.c").map(String::from))
        .collect();
    names.sort();
    let mut modules = String::new();
    for name in &names {
        let generated = out.join(format!("{name}.skel.rs"));
        SkeletonBuilder::new()
            .source(sources.join(format!("{name}.bpf.c")))
            .obj(out.join(format!("{name}.bpf.o")))
            .clang("clang-19")
            .clang_args(clang_arguments(&sources))
            .build_and_generate(&generated)
            .unwrap_or_else(|error| panic!("bpf/{name}.bpf.c (needs Debian package clang-19): {error:#}"));
        writeln!(modules, "pub mod {name} {{ include!({:?}); }}", generated.display().to_string()).unwrap();
    }
    let object =
        |name: &String| format!("({name:?}, include_bytes!({:?}) as &[u8])", out.join(format!("{name}.bpf.o")));
    let objects: Vec<String> = names.iter().map(object).collect();
    writeln!(modules, "pub const OBJECTS: [(&str, &[u8]); {}] = [{}];", names.len(), objects.join(", ")).unwrap();
    std::fs::write(out.join("skeletons.rs"), modules).unwrap();
}

/// `-mcpu=v3` (32-bit operations and jumps) is the newest instruction set that kernel 6.1 knows.
fn clang_arguments(sources: &Path) -> Vec<String> {
    let architecture = std::env::var("CARGO_CFG_TARGET_ARCH").unwrap();
    let mut arguments: Vec<String> = ["-mcpu=v3", "-Wall", "-Wextra", "-Werror"].map(String::from).to_vec();
    arguments.push(format!("-I{}", sources.display()));
    // clang for target bpf does not look into Debian's directory for one architecture, where asm/types.h is.
    arguments.push(format!("-idirafter/usr/include/{architecture}-linux-gnu"));
    arguments
}
