//! Loading `bpf/lb/lb.bpf.c`: its maps, pinned or anonymous, and the variant of the program that the tables need.

use std::fs;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use coreward_intf as intf;
use coreward_model::connection_table::TableSize;
use coreward_model::tuple::Protocol;
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle, MapType, OpenMapMut, libbpf_sys};

use super::connection_memory::{self, SharedConnectionTable};
use super::tables::TableMemory;
use super::variant::Variant;
use super::{LbStampingClock, PacketRate, ServiceIndex};
use crate::lru;
use crate::mmap_array::MmapArray;
use crate::pins::ensure_bpf_file_system;
use crate::skeleton::lb::{LbSkelBuilder, OpenLbMaps, OpenLbSkel};

/// Placement rule that is compiled in as long as no service has a table; most likely the first table uses it.
const DEFAULT_RULES: u32 = 1 << intf::PLACEMENT_RULE_TABLE;
const DEFAULT_MODES: u32 = 1 << intf::CONSISTENCY_STATELESS;
const DEFAULT_FORWARDING: u32 = 1 << intf::FORWARDING_L2;

/// Sizes of the maps that are configured, or grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MapSizes {
    /// Number of sets of entries in the flow table.
    pub flow_set_count: u32,
    pub connection_table_size: TableSize,
    /// Size of the memory for placement tables in bytes, a power of two.
    pub placement_memory_bytes: u32,
    /// Number of rows of counters, a power of two.
    pub counter_rows: u32,
}

impl MapSizes {
    /// Returns the sizes for new maps: configured ones, the smallest placement memory, a row of counters per CPU.
    pub fn new(flow_table_entries: u32, connection_table_size: TableSize) -> anyhow::Result<Self> {
        let cpus = libbpf_rs::num_possible_cpus().context("the number of CPUs")? as u32;
        let counter_rows = cpus.next_power_of_two().min(intf::MAX_LB_COUNTER_ROWS);
        let flow_set_count = flow_table_entries.div_ceil(intf::FLOW_SET_ENTRIES);
        Ok(Self {
            flow_set_count,
            connection_table_size,
            placement_memory_bytes: intf::MIN_PLACEMENT_MEMORY,
            counter_rows,
        })
    }

    fn apply_to(self, maps: &mut OpenLbMaps<'_>) -> anyhow::Result<()> {
        maps.flow_table.set_max_entries(self.flow_set_count).context("the size of the flow table")?;
        maps.connections
            .set_max_entries(self.connection_table_size.entry_count())
            .context("the connection table's size")?;
        lru::set_capacity(&mut maps.fragments, intf::MAX_FRAGMENTED_DATAGRAMS, None)?;
        let memory = self.placement_memory_bytes + intf::PLACEMENT_MEMORY_SLACK;
        maps.placement_memory.set_value_size(memory).context("the memory for placement tables")?;
        maps.lb_counters.set_max_entries(self.counter_rows * intf::LB_COUNTERS_PER_ROW).context("rows of counters")?;
        maps.server_traffic
            .set_max_entries(self.counter_rows * intf::SERVER_ID_COUNT)
            .context("rows of counters by server")?;
        maps.connection_stacks
            .set_max_entries(self.connection_table_size.partition_count())
            .context("the number of the connection table's partitions")
    }
}

pub(super) type ServerEntries = [intf::server_entry; intf::SERVER_ID_COUNT as usize];
/// Flags of the servers of each service, with `intf::SERVER_MEMBERS_PER_WORD` servers in each word.
pub(super) type Membership = [u64; intf::MAX_SERVICES as usize * intf::MEMBERSHIP_WORDS as usize];

/// Maps of the program, in the order of [`MAP_NAMES`], and the mapped memory of those that are accessed directly.
#[derive(Debug)]
pub(super) struct Maps {
    handles: [MapHandle; MAP_NAMES.len()],
    pub state: MmapArray<intf::lb_state>,
    pub servers: MmapArray<ServerEntries>,
    pub membership: MmapArray<Membership>,
    pub counters: MmapArray<[intf::lb_counters]>,
    pub tables: TableMemory,
    sizes: MapSizes,
    /// Packets and bytes sent to servers, by counter row and server id.
    pub traffic: MmapArray<[intf::server_traffic]>,
    pub connections: SharedConnectionTable,
    pub flows: MmapArray<[intf::flow_set]>,
    /// Numbers of connection table entries that packets have allocated, by counter row.
    pub connection_takes: MmapArray<intf::connection_takes>,
    /// Outer headers of encapsulated packets, by server id.
    pub tunnels: MmapArray<intf::server_tunnels>,
}

const MAP_NAMES: [&str; 17] = [
    "state",
    "servers",
    COUNTERS,
    PLACEMENT_MEMORY,
    "server_traffic",
    CONNECTIONS,
    CONNECTION_STACKS,
    "recent_connections",
    "recent_placements",
    FLOW_TABLE,
    FRAGMENTS,
    LB_STAMPED_SERVERS,
    BROADCAST,
    TAKES,
    TUNNELS,
    "lb_stamped_offsets",
    "membership",
];
const COUNTERS: &str = "counters";
const PLACEMENT_MEMORY: &str = "placement_memory";
const LB_STAMPED_SERVERS: &str = "lb_stamped_servers";
const FLOW_TABLE: &str = "flow_table";
const FRAGMENTS: &str = "fragments";
const BROADCAST: &str = "broadcast";
const TAKES: &str = "connection_takes";
const TUNNELS: &str = "tunnels";
const CONNECTIONS: &str = "connections";
const CONNECTION_STACKS: &str = "connection_stacks";

fn maps_of<'a, 'obj>(maps: &'a mut OpenLbMaps<'obj>) -> [&'a mut OpenMapMut<'obj>; MAP_NAMES.len()] {
    [
        &mut maps.bss_state,
        &mut maps.bss_servers,
        &mut maps.lb_counters,
        &mut maps.placement_memory,
        &mut maps.server_traffic,
        &mut maps.connections,
        &mut maps.connection_stacks,
        &mut maps.bss_opened,
        &mut maps.bss_recent,
        &mut maps.flow_table,
        &mut maps.fragments,
        &mut maps.lb_stamped_servers,
        &mut maps.bss_broadcast,
        &mut maps.bss_takes,
        &mut maps.bss_tunnels,
        &mut maps.lb_stamped_offsets,
        &mut maps.bss_members,
    ]
}

impl Maps {
    fn new(handles: [MapHandle; MAP_NAMES.len()], sizes: MapSizes) -> anyhow::Result<Self> {
        let [state, servers, counters, tables, traffic, connections, stacks, .., membership] = &handles;
        let rows = sizes.counter_rows as usize;
        Ok(Self {
            state: MmapArray::new(state).context("mapping the state")?,
            servers: MmapArray::new(servers).context("mapping the servers")?,
            membership: MmapArray::new(membership).context("mapping the services' servers")?,
            counters: MmapArray::new_slice(counters, rows * intf::LB_COUNTERS_PER_ROW as usize)
                .context("mapping the counters")?,
            tables: TableMemory::new(map_memory(tables, sizes.placement_memory_bytes)?, sizes.placement_memory_bytes),
            traffic: MmapArray::new_slice(traffic, rows * intf::SERVER_ID_COUNT as usize)
                .context("mapping the servers' traffic")?,
            connections: connection_memory::map(connections.as_fd(), stacks.as_fd(), sizes.connection_table_size)?,
            flows: MmapArray::new_slice(&handles[map_position(FLOW_TABLE)], sizes.flow_set_count as usize)
                .context("mapping the flow table")?,
            connection_takes: MmapArray::new(&handles[map_position(TAKES)])
                .context("mapping the connection table's takes")?,
            tunnels: MmapArray::new(&handles[map_position(TUNNELS)]).context("mapping the servers' outer addresses")?,
            sizes,
            handles,
        })
    }

    /// Creates empty maps and loads the program that uses them. Returns the maps and the program.
    pub fn create(variant: &Variant, sizes: MapSizes) -> anyhow::Result<(Self, OwnedFd)> {
        let mut storage = MaybeUninit::uninit();
        let mut skeleton = open(&mut storage, variant, &sizes)?;
        sizes.apply_to(&mut skeleton.maps)?;
        let loaded = skeleton.load().context("loading lb.bpf.c into the kernel")?;
        let maps = &loaded.maps;
        let handles = [
            MapHandle::try_from(&maps.bss_state)?,
            MapHandle::try_from(&maps.bss_servers)?,
            MapHandle::try_from(&maps.lb_counters)?,
            MapHandle::try_from(&maps.placement_memory)?,
            MapHandle::try_from(&maps.server_traffic)?,
            MapHandle::try_from(&maps.connections)?,
            MapHandle::try_from(&maps.connection_stacks)?,
            MapHandle::try_from(&maps.bss_opened)?,
            MapHandle::try_from(&maps.bss_recent)?,
            MapHandle::try_from(&maps.flow_table)?,
            MapHandle::try_from(&maps.fragments)?,
            MapHandle::try_from(&maps.lb_stamped_servers)?,
            MapHandle::try_from(&maps.bss_broadcast)?,
            MapHandle::try_from(&maps.bss_takes)?,
            MapHandle::try_from(&maps.bss_tunnels)?,
            MapHandle::try_from(&maps.lb_stamped_offsets)?,
            MapHandle::try_from(&maps.bss_members)?,
        ];
        let maps = Self::new(handles, sizes)?;
        maps.state.store(std::mem::offset_of!(intf::lb_state, layout_version), u64::from(intf::LB_LAYOUT_VERSION));
        Ok((maps, loaded.progs.lb.as_fd().try_clone_to_owned()?))
    }

    /// Loads another variant of the program, which uses the same maps.
    pub fn load(&self, variant: &Variant) -> anyhow::Result<OwnedFd> {
        let mut storage = MaybeUninit::uninit();
        let mut skeleton = open(&mut storage, variant, &self.sizes)?;
        for (map, descriptor) in maps_of(&mut skeleton.maps).into_iter().zip(&self.handles) {
            map.reuse_fd(descriptor.as_fd()).context("reusing a map")?;
        }
        let loaded = skeleton.load().context("loading lb.bpf.c into the kernel")?;
        Ok(loaded.progs.lb.as_fd().try_clone_to_owned()?)
    }

    /// Loads the variant of the program `like` that captures the packets of one service ([`super::capture`]). Returns
    /// this variant and the map of its perf buffer.
    pub fn load_capturing(
        &self,
        like: BorrowedFd<'_>,
        watched: &CapturedService,
    ) -> anyhow::Result<(OwnedFd, MapHandle)> {
        let mut storage = MaybeUninit::uninit();
        let mut skeleton = LbSkelBuilder::default().open(&mut storage).context("opening lb.bpf.o")?;
        let constants = constants_of(like)?;
        // In another version of coreward the constants have another layout and meaning.
        let same = "the attached program was not loaded by this version of coreward: restart the daemon first";
        skeleton.maps.rodata.set_initial_value(&constants).context(same)?;
        let constants = skeleton.maps.rodata_data.as_deref_mut().context("lb.bpf.o has no constants")?;
        constants.capture_in_use = true;
        constants.vlans_or_capture_in_use = true;
        match watched.vip.ip() {
            IpAddr::V4(vip) => {
                constants.capture_of.family = intf::ADDRESS_FAMILY_IPV4 as u8;
                constants.capture_of.vip = u32::from_ne_bytes(vip.octets());
            }
            IpAddr::V6(vip) => {
                constants.capture_of.family = intf::ADDRESS_FAMILY_IPV6 as u8;
                constants.capture_of.vip_ipv6 = zerocopy::transmute!(vip.octets());
            }
        }
        constants.capture_of.port = watched.vip.port().to_be();
        constants.capture_of.protocol = watched.protocol.number();
        constants.capture_of.service = watched.service.0.into();
        constants.capture_of.length = watched.length;
        for (map, descriptor) in maps_of(&mut skeleton.maps).into_iter().zip(&self.handles) {
            map.reuse_fd(descriptor.as_fd()).context("reusing a map")?;
        }
        let loaded = skeleton.load().context("loading lb.bpf.c into the kernel")?;
        Ok((loaded.progs.lb.as_fd().try_clone_to_owned()?, MapHandle::try_from(&loaded.maps.captured)?))
    }

    /// Pins all maps in `directory`, which must be empty.
    pub fn pin(&self, directory: &Path) -> anyhow::Result<()> {
        for (name, descriptor) in MAP_NAMES.iter().zip(&self.handles) {
            super::link::pin(descriptor.as_fd(), &directory.join(name))?;
        }
        Ok(())
    }

    /// Takes over the maps pinned in `directory`. Fails when a map is missing, or has not the layout of this version.
    pub fn take_over(directory: &Path) -> anyhow::Result<Self> {
        let mut storage = MaybeUninit::uninit();
        let mut skeleton = LbSkelBuilder::default().open(&mut storage).context("opening lb.bpf.o")?;
        let sizes = pinned_sizes(directory).with_context(|| recovery_hint(directory))?;
        sizes.apply_to(&mut skeleton.maps)?;
        let expected = maps_of(&mut skeleton.maps);
        let mut handles = Vec::new();
        for (name, expected) in MAP_NAMES.iter().zip(expected) {
            handles.push(pinned_map(&directory.join(name), expected).with_context(|| recovery_hint(directory))?);
        }
        let maps = Self::new(handles.try_into().expect("one per name"), sizes)?;
        let version = maps.state.load(std::mem::offset_of!(intf::lb_state, layout_version));
        ensure!(
            version == u64::from(intf::LB_LAYOUT_VERSION),
            "{}: layout version {version}, expected {}. {}",
            directory.join("state").display(),
            intf::LB_LAYOUT_VERSION,
            recovery_hint(directory)
        );
        Ok(maps)
    }

    /// Changes the connection table in `directory` to the requested size; the flow table keeps its size. Fails when the
    /// connection table has another size and entries in use.
    pub fn resize(&mut self, directory: &Path, requested: MapSizes) -> anyhow::Result<()> {
        if self.sizes.flow_set_count != requested.flow_set_count {
            let entries = |sets: u32| sets * intf::FLOW_SET_ENTRIES;
            tracing::warn!(
                event = "flow-table-size-kept",
                pin_directory = %directory.display(),
                entries = entries(self.sizes.flow_set_count),
                expected = entries(requested.flow_set_count),
                "the pinned flow table keeps its size: to apply `flow_table`, run `coreward lb --detach` first"
            );
        }
        let (found, requested) = (self.connections.size(), requested.connection_table_size);
        if found == requested {
            return Ok(());
        }
        let used = connection_memory::count_used(&self.connections);
        ensure!(
            used == 0,
            "the connection table in {} has {} entries, not {}, and {used} of them are in use: give it the old size, \
             or \
             detach first (forwarding stops)",
            directory.display(),
            found.entry_count(),
            requested.entry_count()
        );
        self.replace_array::<intf::connection>(directory, CONNECTIONS, requested.entry_count())?;
        self.replace_array::<intf::connection_stack>(directory, CONNECTION_STACKS, requested.partition_count())?;
        let [entries, stacks] = [CONNECTIONS, CONNECTION_STACKS].map(|name| self.descriptor(name));
        self.connections = connection_memory::map(entries, stacks, requested)?;
        self.sizes.connection_table_size = requested;
        self.connections.initialise();
        Ok(())
    }

    pub fn flow_set_count(&self) -> usize {
        self.sizes.flow_set_count as usize
    }

    pub fn counter_rows(&self) -> usize {
        self.sizes.counter_rows as usize
    }

    pub fn placement_memory_bytes(&self) -> u32 {
        self.sizes.placement_memory_bytes
    }

    /// Creates a placement memory of `bytes` bytes and copies the present contents into it.
    pub fn create_larger_placement_memory(&self, bytes: u32) -> anyhow::Result<MapHandle> {
        let map = new_array(PLACEMENT_MEMORY, bytes + intf::PLACEMENT_MEMORY_SLACK, 1)?;
        self.tables.memory().copy_to(&map_memory(&map, bytes)?);
        Ok(map)
    }

    /// Loads the program with the placement memory `map`, attaches it by `switch` and returns it. After an error, the
    /// former memory stays in use.
    pub fn switch_placement_memory(
        &mut self,
        map: MapHandle,
        bytes: u32,
        variant: &Variant,
        pins: Option<&Path>,
        switch: impl FnOnce(BorrowedFd<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<OwnedFd> {
        let memory = map_memory(&map, bytes)?;
        let before = (std::mem::replace(&mut self.handles[map_position(PLACEMENT_MEMORY)], map), self.sizes);
        self.sizes.placement_memory_bytes = bytes;
        let switched = self.load(variant).and_then(|program| switch(program.as_fd()).map(|()| program));
        let program = match switched {
            Ok(program) => program,
            Err(error) => {
                (self.handles[map_position(PLACEMENT_MEMORY)], self.sizes) = before;
                return Err(error);
            }
        };
        self.tables.grow(memory, bytes);
        if let Some(pins) = pins {
            super::link::unpin(&pins.join(PLACEMENT_MEMORY))?;
            super::link::pin(self.descriptor(PLACEMENT_MEMORY), &pins.join(PLACEMENT_MEMORY))?;
        }
        Ok(program)
    }

    /// Replaces the array of `T` that is pinned in `directory` as `name` by a new one, filled with zeros.
    fn replace_array<T>(&mut self, directory: &Path, name: &str, entries: u32) -> anyhow::Result<()> {
        let map = new_array(name, size_of::<T>() as u32, entries)?;
        super::link::unpin(&directory.join(name))?;
        super::link::pin(map.as_fd(), &directory.join(name))?;
        self.handles[map_position(name)] = map;
        Ok(())
    }

    fn descriptor(&self, name: &str) -> BorrowedFd<'_> {
        self.handles[map_position(name)].as_fd()
    }

    /// Returns the map that holds the destinations of fragmented datagrams.
    pub fn fragments(&self) -> &MapHandle {
        &self.handles[map_position(FRAGMENTS)]
    }

    /// Returns the map that holds the clocks of servers with LB-side stamping.
    pub fn lb_stamped_servers(&self) -> &MapHandle {
        &self.handles[map_position(LB_STAMPED_SERVERS)]
    }
}

/// Creates an array map, filled with zeros, that can be mapped into memory.
fn new_array(name: &str, value_bytes: u32, entries: u32) -> anyhow::Result<MapHandle> {
    let options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
        map_flags: libbpf_sys::BPF_F_MMAPABLE,
        ..Default::default()
    };
    // The kernel accepts names of at most 15 characters.
    let short = &name[..name.len().min(15)];
    MapHandle::create(MapType::Array, Some(short), size_of::<u32>() as u32, value_bytes, entries, &options)
        .with_context(|| format!("making {name} of {entries} entries of {value_bytes} bytes"))
}

/// Maps the first `bytes` bytes of the map for placement tables into memory.
fn map_memory(map: impl AsFd, bytes: u32) -> anyhow::Result<MmapArray<[u64]>> {
    MmapArray::new_slice(map, bytes as usize / size_of::<u64>()).context("mapping the placement tables")
}

/// Service whose packets `coreward capture` captures.
pub(super) struct CapturedService {
    pub vip: SocketAddr,
    pub protocol: Protocol,
    pub service: ServiceIndex,
    pub length: u32,
}

/// Returns the read-only data of a loaded program, which holds the constants that variants differ in.
fn constants_of(program: BorrowedFd<'_>) -> anyhow::Result<Vec<u8>> {
    let id = libbpf_rs::Program::id_from_fd(program).context("the program's id")?;
    let options = ProgInfoQueryOptions::default().include_map_ids(true);
    let mut programs = ProgInfoIter::with_query_opts(options);
    let info = programs.find(|info| info.id == id).context("the program is not listed")?;
    for map in info.map_ids {
        let map = MapHandle::from_map_id(map).context("a map of the program")?;
        if map.name().to_string_lossy().ends_with(".rodata") {
            let constants = map.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).context("the program's constants")?;
            return constants.context("the program's constants are empty");
        }
    }
    anyhow::bail!("the attached program has no constants: it is not coreward's")
}

fn map_position(name: &str) -> usize {
    MAP_NAMES.iter().position(|of| *of == name).expect("in the list")
}

/// Returns the sizes of the maps pinned in `directory`. Fails when a map is missing, or the connection table has an
/// invalid size.
fn pinned_sizes(directory: &Path) -> anyhow::Result<MapSizes> {
    let entries = |name: &str| {
        let path = directory.join(name);
        Ok::<_, anyhow::Error>(
            MapHandle::from_pinned_path(&path).with_context(|| path.display().to_string())?.max_entries(),
        )
    };
    let connection_table_size = TableSize::try_from(u64::from(entries(CONNECTIONS)?))?;
    let memory = directory.join(PLACEMENT_MEMORY);
    let memory = MapHandle::from_pinned_path(&memory).with_context(|| memory.display().to_string())?.value_size();
    Ok(MapSizes {
        flow_set_count: entries(FLOW_TABLE)?,
        connection_table_size,
        placement_memory_bytes: memory.saturating_sub(intf::PLACEMENT_MEMORY_SLACK),
        counter_rows: entries(COUNTERS)? / intf::LB_COUNTERS_PER_ROW,
    })
}

fn recovery_hint(directory: &Path) -> String {
    format!(
        "What is pinned in {directory} was not made by this version of coreward: `coreward lb` of this version takes \
         its place \
         once it has its configuration, and until then it forwards",
        directory = directory.display()
    )
}

/// Opens the map that is pinned at `path`. Fails when its type or sizes differ from those of the map `expected`.
fn pinned_map(path: &Path, expected: &OpenMapMut<'_>) -> anyhow::Result<MapHandle> {
    let map = MapHandle::from_pinned_path(path).with_context(|| path.display().to_string())?;
    let found = (map.map_type(), map.key_size(), map.value_size(), map.max_entries());
    let expected_layout = (expected.map_type(), expected.key_size(), expected.value_size(), expected.max_entries());
    ensure!(
        found == expected_layout,
        "{}: (type, key size, value size, entries) is {found:?}, expected {expected_layout:?}",
        path.display()
    );
    Ok(map)
}

/// Removes the pins of all maps ([`Maps::pin`]), of any version, but not that of the link.
pub(super) fn unpin_maps(directory: &Path) -> anyhow::Result<()> {
    for entry in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let path = entry?.path();
        if !path.ends_with("link") {
            super::link::unpin(&path)?;
        }
    }
    Ok(())
}

/// Returns whether the attached program, of any version, has a counter row per CPU, as generic XDP needs.
pub(super) fn pinned_counters_by_cpu(directory: &Path) -> anyhow::Result<bool> {
    let path = directory.join("state");
    let state = MapHandle::from_pinned_path(&path).with_context(|| path.display().to_string())?;
    let bytes = state.lookup(&0u32.to_ne_bytes(), MapFlags::ANY)?.context("an empty map")?;
    let at = std::mem::offset_of!(intf::lb_state, counters_by_cpu);
    let word = bytes.get(at..at + size_of::<u64>()).with_context(|| format!("{}: too short", path.display()))?;
    Ok(word.iter().any(|byte| *byte != 0))
}

/// Removes the pins of all maps ([`Maps::pin`]), and the directory.
pub(super) fn unpin(directory: &Path) -> anyhow::Result<()> {
    unpin_maps(directory)?;
    match fs::remove_dir(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| directory.display().to_string())
        }
        _ => Ok(()),
    }
}

pub(super) fn any_pinned(directory: &Path) -> bool {
    MAP_NAMES.iter().any(|name| directory.join(name).exists())
}

fn open<'obj>(
    storage: &'obj mut MaybeUninit<libbpf_rs::OpenObject>,
    variant: &Variant,
    sizes: &MapSizes,
) -> anyhow::Result<OpenLbSkel<'obj>> {
    let mut skeleton = LbSkelBuilder::default().open(storage).context("opening lb.bpf.o")?;
    let constants = skeleton.maps.rodata_data.as_deref_mut().context("lb.bpf.o has no constants")?;
    constants.rules_in_use = bits_or_default(variant.features.rule_bits, DEFAULT_RULES);
    constants.modes_in_use = bits_or_default(variant.features.mode_bits, DEFAULT_MODES);
    constants.timestamps_off_in_use = variant.features.has_timestamps_off;
    constants.timestamps_lb_in_use = variant.features.has_lb_stamping;
    constants.other_balancer_in_use = variant.features.has_transfer;
    constants.lb_stamping_by_ticks = variant.lb_stamping_clock == LbStampingClock::Ticks;
    constants.packets_read_clock = variant.packets_read_clock;
    constants.udp_in_use = variant.features.has_udp;
    constants.ipv6_in_use = variant.features.has_ipv6;
    constants.forwarding_in_use = bits_or_default(variant.features.forwarding_bits, DEFAULT_FORWARDING);
    constants.traffic_in_use = variant.counts_traffic;
    constants.vlans_in_use = variant.vlans.is_used();
    constants.vlans_or_capture_in_use = constants.vlans_in_use;
    constants.vip_vlan = variant.vlans.vip.get();
    constants.counters_by_cpu = variant.counters_by_cpu;
    constants.connection_partition_mask = sizes.connection_table_size.partition_count() - 1;
    constants.placement_memory_mask = sizes.placement_memory_bytes - 1;
    constants.counter_row_mask = sizes.counter_rows - 1;
    constants.flow_set_count = sizes.flow_set_count;
    for (reason, rates) in variant.broadcast_limits.into_iter().enumerate() {
        let source = &mut constants.broadcast_per_source[reason];
        (source.interval_ns, source.burst_ns) = token_bucket_times(rates.per_source);
        let service = &mut constants.broadcast_per_service[reason];
        (service.interval_ns, service.burst_ns) = token_bucket_times(rates.per_service);
        let all = &mut constants.broadcast_total[reason];
        (all.interval_ns, all.burst_ns) = token_bucket_times(rates.total);
    }
    Ok(skeleton)
}

fn bits_or_default(bits: u32, default: u32) -> u32 {
    if bits == 0 { default } else { bits }
}

/// Converts a rate to the fields of `struct token_bucket` in `bpf/lb/broadcast.h`: ns per token, and burst in ns.
fn token_bucket_times(rate: PacketRate) -> (u64, u64) {
    let interval = 1_000_000_000 / u64::from(rate.per_second.max(1));
    (interval, interval * u64::from(rate.burst.max(1) - 1))
}

/// Returns the load balancer's directory below the configured one, which is created if it is missing. Fails when the
/// directory is not on a BPF file system.
pub(super) fn create_pin_directory(configured: &Path) -> anyhow::Result<PathBuf> {
    let directory = configured.join("lb");
    fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    ensure_bpf_file_system(configured)?;
    Ok(directory)
}

/// Returns the directory that contains a load balancer's pinned maps. Fails when no map is pinned there.
pub(super) fn existing_pin_directory(configured: &Path) -> anyhow::Result<PathBuf> {
    let directory = configured.join("lb");
    ensure!(
        any_pinned(&directory),
        "no load balancer has pinned anything in {}: expected its `pin_directory`",
        configured.display()
    );
    Ok(directory)
}
