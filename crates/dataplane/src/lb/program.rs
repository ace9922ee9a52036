//! Loading `bpf/lb.bpf.c`: its maps, pinned or anonymous, and the variant of the program that the tables need.

use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use coreward_intf as intf;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use libbpf_rs::{MapCore as _, MapHandle, OpenMapMut};

use super::ToAllRate;
use crate::mapped::Mapped;
use crate::skeleton::lb::{LbSkelBuilder, OpenLbMaps, OpenLbSkel};

/// What is fixed when the program is loaded; a change loads it anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Variant {
    /// Bits of the placement rules that are compiled in.
    pub rules: u32,
    /// One row of counters per CPU instead of one per receive queue: for generic XDP.
    pub counters_by_cpu: bool,
    pub to_all: ToAllRate,
}

/// All tables of placement: two halves per service.
pub(super) type Tables = [intf::placement_table; 2 * intf::MAX_SERVICES as usize];
/// All servers of all services.
pub(super) type Servers = [intf::server_entry; intf::MAX_SERVICES as usize * intf::SERVER_ID_COUNT as usize];
/// All counters.
pub(super) type CounterRows = [intf::lb_counter_row; intf::LB_COUNTER_ROWS as usize];

/// The maps of the program, in the order of [`MAP_NAMES`], and the memory of those that we write or read.
#[derive(Debug)]
pub(super) struct Maps {
    descriptors: [OwnedFd; MAP_NAMES.len()],
    pub state: Mapped<intf::lb_state>,
    pub servers: Mapped<Servers>,
    pub counters: Mapped<CounterRows>,
    pub tables: Mapped<Tables>,
}

/// Names of the pins.
const MAP_NAMES: [&str; 5] = ["state", "servers", "counters", "placement_tables", "recent_first_packets"];

fn maps_of<'a, 'obj>(maps: &'a mut OpenLbMaps<'obj>) -> [&'a mut OpenMapMut<'obj>; MAP_NAMES.len()] {
    [
        &mut maps.bss_state,
        &mut maps.bss_servers,
        &mut maps.bss_counters,
        &mut maps.placement_tables,
        &mut maps.bss_recent,
    ]
}

impl Maps {
    fn new(descriptors: [OwnedFd; MAP_NAMES.len()]) -> anyhow::Result<Self> {
        let [state, servers, counters, tables, _] = &descriptors;
        Ok(Self {
            state: Mapped::new(state).context("mapping the state")?,
            servers: Mapped::new(servers).context("mapping the servers")?,
            counters: Mapped::new(counters).context("mapping the counters")?,
            tables: Mapped::new(tables).context("mapping the placement tables")?,
            descriptors,
        })
    }

    /// New maps, empty, and the program that uses them.
    pub fn create(variant: &Variant) -> anyhow::Result<(Self, OwnedFd)> {
        let mut storage = MaybeUninit::uninit();
        let loaded = open(&mut storage, variant)?.load().context("loading lb.bpf.c into the kernel")?;
        let maps = &loaded.maps;
        let descriptor = |map: BorrowedFd<'_>| map.try_clone_to_owned();
        let maps = Self::new([
            descriptor(maps.bss_state.as_fd())?,
            descriptor(maps.bss_servers.as_fd())?,
            descriptor(maps.bss_counters.as_fd())?,
            descriptor(maps.placement_tables.as_fd())?,
            descriptor(maps.bss_recent.as_fd())?,
        ])?;
        maps.state.store(std::mem::offset_of!(intf::lb_state, layout_version), u64::from(intf::LB_LAYOUT_VERSION));
        Ok((maps, loaded.progs.lb.as_fd().try_clone_to_owned()?))
    }

    /// The program in another variant, on the same maps.
    pub fn load(&self, variant: &Variant) -> anyhow::Result<OwnedFd> {
        let mut storage = MaybeUninit::uninit();
        let mut skeleton = open(&mut storage, variant)?;
        for (map, descriptor) in maps_of(&mut skeleton.maps).into_iter().zip(&self.descriptors) {
            map.reuse_fd(descriptor.as_fd()).context("reusing a map")?;
        }
        let loaded = skeleton.load().context("loading lb.bpf.c into the kernel")?;
        Ok(loaded.progs.lb.as_fd().try_clone_to_owned()?)
    }

    /// Pins all maps in `directory`, which must be empty.
    pub fn pin(&self, directory: &Path) -> anyhow::Result<()> {
        for (name, descriptor) in MAP_NAMES.iter().zip(&self.descriptors) {
            super::link::pin(descriptor.as_fd(), &directory.join(name))?;
        }
        Ok(())
    }

    /// Takes the maps over that are pinned in `directory`.
    ///
    /// # Errors
    /// When one is missing or is not what this program would make.
    pub fn take_over(directory: &Path) -> anyhow::Result<Self> {
        let mut storage = MaybeUninit::uninit();
        let any = Variant { rules: 0, counters_by_cpu: false, to_all: ToAllRate::default() };
        let mut skeleton = open(&mut storage, &any)?;
        let expected = maps_of(&mut skeleton.maps);
        let mut descriptors = Vec::new();
        for (name, expected) in MAP_NAMES.iter().zip(expected) {
            descriptors.push(pinned_map(&directory.join(name), expected).with_context(|| advice(directory))?);
        }
        let maps = Self::new(descriptors.try_into().expect("one per name"))?;
        let version = maps.state.load(std::mem::offset_of!(intf::lb_state, layout_version));
        ensure!(
            version == u64::from(intf::LB_LAYOUT_VERSION),
            "{}: layout version {version}, expected {}. {}",
            directory.join("state").display(),
            intf::LB_LAYOUT_VERSION,
            advice(directory)
        );
        Ok(maps)
    }
}

fn advice(directory: &Path) -> String {
    format!(
        "What is pinned in {directory} was not made by this version of coreward: start the version that made it, or \
         remove {directory} (forwarding stops until this one is up)",
        directory = directory.display()
    )
}

/// The map pinned at `path`, if it has the shape of `expected`.
fn pinned_map(path: &Path, expected: &OpenMapMut<'_>) -> anyhow::Result<OwnedFd> {
    let map = MapHandle::from_pinned_path(path).with_context(|| path.display().to_string())?;
    let found = (map.map_type(), map.key_size(), map.value_size(), map.max_entries());
    let wanted = (expected.map_type(), expected.key_size(), expected.value_size(), expected.max_entries());
    ensure!(
        found == wanted,
        "{}: (type, key size, value size, entries) is {found:?}, expected {wanted:?}",
        path.display()
    );
    Ok(map.as_fd().try_clone_to_owned()?)
}

/// Removes what [`Maps::pin`] made.
pub(super) fn unpin(directory: &Path) -> anyhow::Result<()> {
    for name in MAP_NAMES {
        super::link::unpin(&directory.join(name))?;
    }
    match fs::remove_dir(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| directory.display().to_string())
        }
        _ => Ok(()),
    }
}

/// Whether any map is pinned there.
pub(super) fn any_pinned(directory: &Path) -> bool {
    MAP_NAMES.iter().any(|name| directory.join(name).exists())
}

fn open<'obj>(
    storage: &'obj mut MaybeUninit<libbpf_rs::OpenObject>,
    variant: &Variant,
) -> anyhow::Result<OpenLbSkel<'obj>> {
    let mut skeleton = LbSkelBuilder::default().open(storage).context("opening lb.bpf.o")?;
    let constants = skeleton.maps.rodata_data.as_deref_mut().context("lb.bpf.o has no constants")?;
    constants.rules_in_use = variant.rules;
    constants.counters_by_cpu = variant.counters_by_cpu;
    constants.to_all_interval_ns = 1_000_000_000 / u64::from(variant.to_all.per_second.max(1));
    constants.to_all_burst_ns = constants.to_all_interval_ns * u64::from(variant.to_all.burst.max(1) - 1);
    Ok(skeleton)
}

/// Where the load balancer pins below the configured directory; made if missing.
///
/// # Errors
/// When the directory is not on a BPF file system.
pub(super) fn pin_directory(configured: &Path) -> anyhow::Result<PathBuf> {
    let directory = configured.join("lb");
    fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    let file_system = nix::sys::statfs::statfs(&directory).with_context(|| directory.display().to_string())?;
    ensure!(
        file_system.filesystem_type() == nix::sys::statfs::BPF_FS_MAGIC,
        "{}: expected a directory on a BPF file system (`mount -t bpf bpf /sys/fs/bpf`)",
        configured.display()
    );
    Ok(directory)
}
