//! Generates Rust code from `bpf/include/intf.h`. bindgen makes the layouts, and each enum gets a list of its variants'
//! names. So metrics and `coreward status` know the names of counters that are added in C.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use bindgen::callbacks::{DeriveInfo, EnumVariantCustomBehavior, EnumVariantValue, ParseCallbacks};

/// Enums for which a list of variant names is generated. An entry has the enum, the prefix to remove from the variants'
/// names, and the list's name.
const ENUMS_WITH_NAME_LISTS: [(&str, &str, &str); 10] = [
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

type CollectedEnumVariants = Arc<Mutex<Vec<(String, String, i64)>>>;

#[derive(Debug)]
struct EnumVariantCollector {
    enum_variants: CollectedEnumVariants,
}

impl ParseCallbacks for EnumVariantCollector {
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
        let variant_value = match value {
            EnumVariantValue::Signed(v) => v,
            EnumVariantValue::Unsigned(v) => v as i64,
            EnumVariantValue::Boolean(v) => i64::from(v),
        };
        let enum_name = enum_name.unwrap_or_default().trim_start_matches("enum ").to_string();
        self.enum_variants.lock().unwrap().push((enum_name, variant_name.to_string(), variant_value));
        None
    }
}

fn generate_name_lists(variants: &[(String, String, i64)]) -> String {
    let mut source_text = String::new();
    for (enum_name, prefix, constant) in ENUMS_WITH_NAME_LISTS {
        let mut listed_variants: Vec<(i64, String)> = variants
            .iter()
            .filter(|(name, variant, _)| name == enum_name && !variant.ends_with("_COUNT"))
            .map(|(_, variant, value)| (*value, variant.trim_start_matches(prefix).to_lowercase()))
            .collect();
        listed_variants.sort();
        listed_variants.dedup();
        assert!(!listed_variants.is_empty(), "bpf/include/intf.h has no enum {enum_name}");
        for (position, (value, name)) in listed_variants.iter().enumerate() {
            assert_eq!(position as i64, *value, "enum {enum_name}: {name} leaves a gap");
        }
        let quoted_names: Vec<String> = listed_variants.iter().map(|(_, name)| format!("{name:?}")).collect();
        writeln!(source_text, "/// Names of `enum {enum_name}` in the order of their values.").unwrap();
        writeln!(source_text, "pub const {constant}: [&str; {}] = [{}];", quoted_names.len(), quoted_names.join(", "))
            .unwrap();
    }
    source_text
}

fn main() {
    let include_directory = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("../../bpf/include");
    let header = include_directory.join("intf.h");
    println!("cargo::rerun-if-changed={}", include_directory.display());
    println!("cargo::rerun-if-changed=build.rs");
    let enum_variants = CollectedEnumVariants::default();
    let bindings = bindgen::Builder::default()
        .header(header.display().to_string())
        .allowlist_file(".*/bpf/include/[a-z_]+\\.h")
        .parse_callbacks(Box::new(EnumVariantCollector { enum_variants: enum_variants.clone() }))
        .derive_default(true)
        .layout_tests(false)
        .prepend_enum_name(false)
        .merge_extern_blocks(true)
        .generate()
        .expect("bindgen on bpf/include/intf.h (needs libclang: Debian package libclang1-19)");
    let output_directory = PathBuf::from(std::env::var_os("OUT_DIR").unwrap());
    bindings.write_to_file(output_directory.join("intf.rs")).unwrap();
    std::fs::write(output_directory.join("names.rs"), generate_name_lists(&enum_variants.lock().unwrap())).unwrap();
}
