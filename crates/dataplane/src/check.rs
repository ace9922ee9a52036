//! Whether this kernel takes the programs: each is loaded, attached to nothing, and let go.

use std::mem::MaybeUninit;

use anyhow::Context as _;
use coreward_intf as intf;
use libbpf_rs::ObjectBuilder;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};

use crate::skeleton;
use crate::skeleton::lb::LbSkelBuilder;

/// Loads every program; gives the name of each with what the kernel said.
pub fn load_every_program() -> Vec<(&'static str, anyhow::Result<()>)> {
    skeleton::OBJECTS.into_iter().map(|(name, object)| (name, load(name, object))).collect()
}

fn load(name: &str, object: &[u8]) -> anyhow::Result<()> {
    match name {
        // Without rules there is nothing to place: each variant that tables may ask for, and the one with all rules.
        "lb" => {
            let every_rule = (1 << intf::PLACEMENT_RULE_COUNT) - 1;
            (0..intf::PLACEMENT_RULE_COUNT).map(|rule| 1 << rule).chain([every_rule]).try_for_each(load_lb)?;
        }
        _ => drop(ObjectBuilder::default().open_memory(object)?.load()?),
    }
    Ok(())
}

fn load_lb(rules: u32) -> anyhow::Result<()> {
    let mut storage = MaybeUninit::uninit();
    let mut open = LbSkelBuilder::default().open(&mut storage)?;
    let rodata = open.maps.rodata_data.as_deref_mut().context("lb.bpf.c without read-only data")?;
    rodata.rules_in_use = rules;
    open.load().map(drop).with_context(|| format!("with the placement rules {rules:#b}"))
}
