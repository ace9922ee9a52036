//! Turns `bpf/include/intf.h` into Rust: the layouts by bindgen, and for each enum the list of its variants' names, so
//! that metrics and `coreward status` name a counter added in C.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use bindgen::callbacks::{DeriveInfo, EnumVariantCustomBehavior, EnumVariantValue, ParseCallbacks};

/// Enums whose variants become a list of names, each with its prefix that the names lose.
const NAMED_ENUMS: [(&str, &str, &str); 10] = [
    ("lb_counter", "LB_COUNTER_", "LB_COUNTER_NAMES"),
    ("server_counter", "SERVER_COUNTER_", "SERVER_COUNTER_NAMES"),
    ("decap_counter", "DECAP_COUNTER_", "DECAP_COUNTER_NAMES"),
    ("steer_counter", "STEER_COUNTER_", "STEER_COUNTER_NAMES"),
    ("placement_rule", "PLACEMENT_RULE_", "PLACEMENT_RULE_NAMES"),
    ("consistency", "CONSISTENCY_", "CONSISTENCY_NAMES"),
    ("lb_event", "LB_EVENT_", "LB_EVENT_NAMES"),
    ("dispatch_policy", "DISPATCH_POLICY_", "DISPATCH_POLICY_NAMES"),
    ("dispatch_counter", "DISPATCH_COUNTER_", "DISPATCH_COUNTER_NAMES"),
    ("intake_counter", "INTAKE_COUNTER_", "INTAKE_COUNTER_NAMES"),
];

type Variants = Arc<Mutex<Vec<(String, String, i64)>>>;

#[derive(Debug)]
struct Callbacks {
    variants: Variants,
}

impl ParseCallbacks for Callbacks {
    fn add_derives(&self, _info: &DeriveInfo<'_>) -> Vec<String> {
        [
            "zerocopy::FromBytes",
            "zerocopy::IntoBytes",
            "zerocopy::Immutable",
            "zerocopy::KnownLayout",
            "PartialEq",
            "Eq",
        ]
        .map(String::from)
        .to_vec()
    }

    fn enum_variant_behavior(
        &self,
        enum_name: Option<&str>,
        variant_name: &str,
        value: EnumVariantValue,
    ) -> Option<EnumVariantCustomBehavior> {
        let value = match value {
            EnumVariantValue::Signed(v) => v,
            EnumVariantValue::Unsigned(v) => v as i64,
            EnumVariantValue::Boolean(v) => i64::from(v),
        };
        let enum_name = enum_name.unwrap_or_default().trim_start_matches("enum ").to_string();
        self.variants.lock().unwrap().push((enum_name, variant_name.to_string(), value));
        None
    }
}

fn names(variants: &[(String, String, i64)]) -> String {
    let mut out = String::new();
    for (enum_name, prefix, constant) in NAMED_ENUMS {
        let mut listed: Vec<(i64, String)> = variants
            .iter()
            .filter(|(name, variant, _)| name == enum_name && !variant.ends_with("_COUNT"))
            .map(|(_, variant, value)| (*value, variant.trim_start_matches(prefix).to_lowercase()))
            .collect();
        listed.sort();
        listed.dedup();
        assert!(!listed.is_empty(), "bpf/include/intf.h has no enum {enum_name}");
        for (position, (value, name)) in listed.iter().enumerate() {
            assert_eq!(position as i64, *value, "enum {enum_name}: {name} leaves a gap");
        }
        let list: Vec<String> = listed.iter().map(|(_, name)| format!("{name:?}")).collect();
        writeln!(out, "/// Names of `enum {enum_name}` in the order of their values.").unwrap();
        writeln!(out, "pub const {constant}: [&str; {}] = [{}];", list.len(), list.join(", ")).unwrap();
    }
    out
}

fn main() {
    let include = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("../../bpf/include");
    let header = include.join("intf.h");
    println!("cargo::rerun-if-changed={}", include.display());
    println!("cargo::rerun-if-changed=build.rs");
    let variants = Variants::default();
    let bindings = bindgen::Builder::default()
        .header(header.display().to_string())
        .allowlist_file(".*/bpf/include/[a-z_]+\\.h")
        .parse_callbacks(Box::new(Callbacks { variants: variants.clone() }))
        .derive_default(true)
        .layout_tests(false)
        .prepend_enum_name(false)
        .merge_extern_blocks(true)
        .generate()
        .expect("bindgen on bpf/include/intf.h (needs libclang: Debian package libclang1-19)");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap());
    bindings.write_to_file(out.join("intf.rs")).unwrap();
    std::fs::write(out.join("names.rs"), names(&variants.lock().unwrap())).unwrap();
}
