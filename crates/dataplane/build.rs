//! Compiles every `bpf/*/*.bpf.c` and generates its skeleton: `skeleton::<file name>` in the crate. A new file there
//! needs no change here.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use libbpf_cargo::SkeletonBuilder;

fn main() {
    let sources = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("../../bpf");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap());
    println!("cargo::rerun-if-changed={}", sources.display());
    let programs = programs(&sources);
    let mut modules = String::new();
    for (name, source) in &programs {
        let generated = out.join(format!("{name}.skel.rs"));
        SkeletonBuilder::new()
            .source(source)
            .obj(out.join(format!("{name}.bpf.o")))
            .clang("clang-19")
            .clang_args(clang_arguments(&sources))
            .build_and_generate(&generated)
            .unwrap_or_else(|error| panic!("{} (needs Debian package clang-19): {error:#}", source.display()));
        writeln!(modules, "pub mod {name} {{ include!({:?}); }}", generated.display().to_string()).unwrap();
    }
    let object =
        |name: &String| format!("({name:?}, include_bytes!({:?}) as &[u8])", out.join(format!("{name}.bpf.o")));
    let objects: Vec<String> = programs.keys().map(object).collect();
    writeln!(modules, "pub const OBJECTS: [(&str, &[u8]); {}] = [{}];", programs.len(), objects.join(", ")).unwrap();
    std::fs::write(out.join("skeletons.rs"), modules).unwrap();
}

fn programs(sources: &Path) -> BTreeMap<String, PathBuf> {
    let list = |folder: &Path| {
        let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    };
    let folders = list(sources).into_iter().filter(|path| path.is_dir());
    let files = folders.flat_map(|folder| list(&folder));
    let name = |path: &PathBuf| path.file_name()?.to_str()?.strip_suffix(".bpf.c").map(String::from);
    files.filter_map(|path| Some((name(&path)?, path))).collect()
}

/// `-mcpu=v3` (32-bit operations and jumps) is the newest instruction set that kernel 6.1 knows.
fn clang_arguments(sources: &Path) -> Vec<String> {
    let architecture = std::env::var("CARGO_CFG_TARGET_ARCH").unwrap();
    let mut arguments: Vec<String> = ["-mcpu=v3", "-Wall", "-Wextra", "-Werror"].map(String::from).to_vec();
    arguments.push(format!("-I{}", sources.join("include").display()));
    // clang for target bpf does not look into Debian's directory for one architecture, where asm/types.h is.
    arguments.push(format!("-idirafter/usr/include/{architecture}-linux-gnu"));
    arguments
}
