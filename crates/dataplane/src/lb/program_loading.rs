//! Loading of the program, with new maps or with those that an earlier process pinned.

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::Context as _;
use coreward_intf as intf;
use coreward_model::ServiceAddress;
use coreward_model::cookie::CookieKey;

use super::link::XdpLink;
use super::program::{self, BpfMapSizes, LoadBalancerMaps};
use super::program_variant::ProgramVariant;
use super::services::{ForwardedService, read_services, required_program_features};
use super::{LoadBalancerOptions, connections, placement, vlans};

/// Attached program of an earlier process.
struct PinnedLbProgram {
    link: XdpLink,
    /// Maps of the program, or `None` if they have another version's layout.
    maps: Option<LoadBalancerMaps>,
}

impl PinnedLbProgram {
    /// Returns the program whose link and maps are pinned in `lb_directory`. If no link is pinned, removes pinned maps
    /// and returns `None`.
    fn find(lb_directory: &Path) -> anyhow::Result<Option<Self>> {
        let Some(link) = XdpLink::open_pinned(&lb_directory.join("link"))? else {
            remove_unused_pinned_maps(lb_directory)?;
            return Ok(None);
        };
        let maps = match LoadBalancerMaps::take_over(lb_directory) {
            Ok(maps) => Some(maps),
            Err(problem) => {
                tracing::warn!(
                    event = "upgrade-pending",
                    pin_directory = %lb_directory.display(),
                    reason = format!("{problem:#}"),
                    "the pinned program of another version forwards packets until the controller has sent \
                     configuration and tables"
                );
                None
            }
        };
        Ok(Some(Self { link, maps }))
    }
}

/// Removes pinned maps that an interrupted start or a removed link has left.
fn remove_unused_pinned_maps(lb_directory: &Path) -> anyhow::Result<()> {
    if !program::has_pinned_map(lb_directory) {
        return Ok(());
    }
    tracing::info!(
        event = "pins-removed",
        pin_directory = %lb_directory.display(),
        "the load balancer removes pinned maps that no attached program uses, as after an interrupted start"
    );
    program::unpin_maps_and_directory(lb_directory)?;
    std::fs::create_dir_all(lb_directory).with_context(|| lb_directory.display().to_string())
}

/// Loaded program with its maps, services and links.
pub(super) struct LoadedLbProgram {
    pub maps: LoadBalancerMaps,
    pub variant: ProgramVariant,
    pub program: OwnedFd,
    pub services: BTreeMap<ServiceAddress, ForwardedService>,
    /// Link of the program whose maps were taken over.
    pub xdp_link: Option<XdpLink>,
    /// Link of another version's program, which forwards until the upgrade.
    pub old_program_link: Option<XdpLink>,
}

impl LoadedLbProgram {
    /// Loads the program with the maps pinned in `lb_directory`, or with new maps if no maps of this version are
    /// pinned.
    pub fn load(
        options: &LoadBalancerOptions,
        map_sizes: BpfMapSizes,
        lb_directory: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let variant = ProgramVariant::new(options);
        let hash_key = options.connection_hash_key;
        let Some(pins) = lb_directory else { return Self::create(variant, map_sizes, hash_key) };
        match PinnedLbProgram::find(pins)? {
            None => {
                let created_program = Self::create(variant, map_sizes, hash_key)?;
                created_program.maps.pin(pins)?;
                Ok(created_program)
            }
            Some(PinnedLbProgram { link, maps: None }) => {
                let counters_by_cpu = program::are_pinned_counters_per_cpu(pins)?;
                let created_program = Self::create(
                    ProgramVariant { has_per_cpu_counters: counters_by_cpu, ..variant },
                    map_sizes,
                    hash_key,
                )?;
                Ok(Self { old_program_link: Some(link), ..created_program })
            }
            Some(PinnedLbProgram { link, maps: Some(mut maps) }) => {
                maps.resize_connection_table(pins, map_sizes)?;
                Ok(Self { xdp_link: Some(link), ..Self::load_with_maps(maps, variant)? })
            }
        }
    }

    /// Loads the program with empty maps.
    fn create(variant: ProgramVariant, map_sizes: BpfMapSizes, hash_key: Option<CookieKey>) -> anyhow::Result<Self> {
        let (maps, program) = LoadBalancerMaps::create(&variant, map_sizes)?;
        connections::initialise_connection_table(&maps, hash_key);
        Ok(Self { maps, variant, program, services: BTreeMap::new(), xdp_link: None, old_program_link: None })
    }

    /// Loads the program with the maps of an earlier process, and thus its services, tables and connections.
    fn load_with_maps(mut maps: LoadBalancerMaps, mut variant: ProgramVariant) -> anyhow::Result<Self> {
        connections::recover_lost_entries(&maps.connections)?;
        let mut services = read_services(&maps);
        placement::assign_tables_to_services(&mut maps, &mut services);
        variant.required_features = required_program_features(&services);
        variant.vlan_settings.has_server_vlan = vlans::has_server_in_vlan(&maps);
        variant.has_per_cpu_counters = maps.state.load(offset_of!(intf::lb_state, counters_by_cpu)) != 0;
        let program = maps.load_program(&variant)?;
        Ok(Self { maps, variant, program, services, xdp_link: None, old_program_link: None })
    }
}
