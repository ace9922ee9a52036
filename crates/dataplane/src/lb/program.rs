//! Loading of `bpf/lb/lb.bpf.c`, with its maps and in the variant that the services and tables need.

use std::fs;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use anyhow::{Context as _, ensure};
use coreward_intf as intf;
use coreward_model::connection_table::ConnectionTableSize;
use coreward_model::tuple::TransportProtocol;
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle, MapType, OpenMapMut, libbpf_sys};

use super::connection_memory::{self, SharedConnectionTable};
use super::placement_memory::PlacementMemory;
use super::program_variant::ProgramVariant;
use super::{LbStampingClock, MAX_FLOW_TABLE_ENTRIES, PacketRateLimit, ServiceIndex};
use crate::lru_map_sizes;
use crate::mmap_array::MmapArray;
use crate::skeleton::lb::{LbSkelBuilder, OpenLbMaps, OpenLbSkel};

/// Bit of the placement rule in the program before any service has a table. The first table most likely has this rule.
const DEFAULT_PLACEMENT_RULE_BITS: u32 = 1 << intf::PLACEMENT_RULE_TABLE;
const DEFAULT_CONSISTENCY_MODE_BITS: u32 = 1 << intf::CONSISTENCY_STATELESS;
const DEFAULT_FORWARDING_MODE_BITS: u32 = 1 << intf::FORWARDING_L2;

/// Sizes of the maps whose size is configured or may grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BpfMapSizes {
    /// Number of sets in the flow table, each of which has several entries.
    pub flow_table_set_count: u32,
    pub connection_table_size: ConnectionTableSize,
    /// Size of the memory for placement tables in bytes, a power of two.
    pub placement_memory_bytes: u32,
    /// Number of counter rows, a power of two. Each CPU has its own row, unless there are too many CPUs.
    pub counter_row_count: u32,
}

impl BpfMapSizes {
    /// Returns the sizes for new maps, with the smallest placement memory and a counter row per CPU. Fails when the
    /// flow table's size is out of range.
    pub fn new(flow_table_entries: u32, connection_table_size: ConnectionTableSize) -> anyhow::Result<Self> {
        ensure!(
            (1..=MAX_FLOW_TABLE_ENTRIES).contains(&flow_table_entries),
            "a flow table of {flow_table_entries} entries: expected 1 to {MAX_FLOW_TABLE_ENTRIES}"
        );
        let cpu_count = libbpf_rs::num_possible_cpus().context("the number of CPUs")? as u32;
        let counter_row_count = cpu_count.next_power_of_two().min(intf::MAX_LB_COUNTER_ROWS);
        let flow_table_set_count = flow_table_entries.div_ceil(intf::FLOW_SET_ENTRIES);
        Ok(Self {
            flow_table_set_count,
            connection_table_size,
            placement_memory_bytes: intf::MIN_PLACEMENT_MEMORY,
            counter_row_count,
        })
    }

    fn set_map_sizes(self, maps: &mut OpenLbMaps<'_>) -> anyhow::Result<()> {
        maps.flow_table.set_max_entries(self.flow_table_set_count).context("the size of the flow table")?;
        maps.connections
            .set_max_entries(self.connection_table_size.entry_count())
            .context("the connection table's size")?;
        lru_map_sizes::set_lru_capacity(&mut maps.fragments, intf::MAX_FRAGMENTED_DATAGRAMS, None)?;
        let placement_map_bytes = self.placement_memory_bytes + intf::PLACEMENT_MEMORY_SLACK;
        maps.placement_memory.set_value_size(placement_map_bytes).context("the memory for placement tables")?;
        maps.lb_counters
            .set_max_entries(self.counter_row_count * intf::LB_COUNTERS_PER_ROW)
            .context("rows of counters")?;
        maps.server_traffic
            .set_max_entries(self.counter_row_count * intf::SERVER_ID_COUNT)
            .context("rows of counters by server")?;
        maps.connection_stacks
            .set_max_entries(self.connection_table_size.partition_count())
            .context("the number of the connection table's partitions")
    }
}

pub(super) type ServerEntries = [intf::server_entry; intf::SERVER_ID_COUNT as usize];
/// Flags of each service's servers. Each word holds the flags of `intf::SERVER_MEMBERS_PER_WORD` servers.
pub(super) type ServiceMemberFlags = [u64; intf::MAX_SERVICES as usize * intf::MEMBERSHIP_WORDS as usize];

/// BPF maps of the program, and memory mappings of the maps that user space reads and writes directly.
#[derive(Debug)]
pub(super) struct LoadBalancerMaps {
    map_handles: [MapHandle; LB_MAP_NAMES.len()],
    pub state: MmapArray<intf::lb_state>,
    pub server_entries: MmapArray<ServerEntries>,
    pub service_member_flags: MmapArray<ServiceMemberFlags>,
    pub counter_entries: MmapArray<[intf::lb_counters]>,
    pub placement_memory: PlacementMemory,
    map_sizes: BpfMapSizes,
    /// Counters of packets and bytes sent to servers, by counter row and server id.
    pub server_traffic: MmapArray<[intf::server_traffic]>,
    pub connections: SharedConnectionTable,
    pub flow_table: MmapArray<[intf::flow_set]>,
    /// Numbers of connection table entries that packets have allocated, by counter row.
    pub connection_takes: MmapArray<intf::connection_takes>,
    /// Outer headers of encapsulated packets, by server id.
    pub server_tunnels: MmapArray<intf::server_tunnels>,
}

const LB_MAP_NAMES: [&str; 17] = [
    "state",
    "servers",
    COUNTERS_MAP,
    PLACEMENT_MEMORY_MAP,
    "server_traffic",
    CONNECTIONS_MAP,
    CONNECTION_STACKS_MAP,
    "recent_connections",
    "recent_placements",
    FLOW_TABLE_MAP,
    FRAGMENTS_MAP,
    LB_STAMPED_SERVERS_MAP,
    BROADCAST_MAP,
    CONNECTION_TAKES_MAP,
    TUNNELS_MAP,
    "lb_stamped_offsets",
    "membership",
];
const COUNTERS_MAP: &str = "counters";
const PLACEMENT_MEMORY_MAP: &str = "placement_memory";
const LB_STAMPED_SERVERS_MAP: &str = "lb_stamped_servers";
const FLOW_TABLE_MAP: &str = "flow_table";
const FRAGMENTS_MAP: &str = "fragments";
const BROADCAST_MAP: &str = "broadcast";
const CONNECTION_TAKES_MAP: &str = "connection_takes";
const TUNNELS_MAP: &str = "tunnels";
const CONNECTIONS_MAP: &str = "connections";
const CONNECTION_STACKS_MAP: &str = "connection_stacks";

fn maps_in_name_order<'a, 'obj>(maps: &'a mut OpenLbMaps<'obj>) -> [&'a mut OpenMapMut<'obj>; LB_MAP_NAMES.len()] {
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

impl LoadBalancerMaps {
    fn new(handles: [MapHandle; LB_MAP_NAMES.len()], sizes: BpfMapSizes) -> anyhow::Result<Self> {
        let [state, servers, counters, tables, traffic, connections, stacks, .., membership] = &handles;
        let counter_row_count = sizes.counter_row_count as usize;
        Ok(Self {
            state: MmapArray::new(state).context("mapping the state")?,
            server_entries: MmapArray::new(servers).context("mapping the servers")?,
            service_member_flags: MmapArray::new(membership).context("mapping the services' servers")?,
            counter_entries: MmapArray::mmap_slice(counters, counter_row_count * intf::LB_COUNTERS_PER_ROW as usize)
                .context("mapping the counters")?,
            placement_memory: PlacementMemory::new(
                mmap_placement_memory(tables, sizes.placement_memory_bytes)?,
                sizes.placement_memory_bytes,
            ),
            server_traffic: MmapArray::mmap_slice(traffic, counter_row_count * intf::SERVER_ID_COUNT as usize)
                .context("mapping the servers' traffic")?,
            connections: connection_memory::mmap_connection_table(
                connections.as_fd(),
                stacks.as_fd(),
                sizes.connection_table_size,
            )?,
            flow_table: MmapArray::mmap_slice(&handles[map_index(FLOW_TABLE_MAP)], sizes.flow_table_set_count as usize)
                .context("mapping the flow table")?,
            connection_takes: MmapArray::new(&handles[map_index(CONNECTION_TAKES_MAP)])
                .context("mapping the connection table's takes")?,
            server_tunnels: MmapArray::new(&handles[map_index(TUNNELS_MAP)])
                .context("mapping the servers' outer addresses")?,
            map_sizes: sizes,
            map_handles: handles,
        })
    }

    /// Creates empty maps and loads the program with them. Returns the maps and the program.
    pub fn create(variant: &ProgramVariant, sizes: BpfMapSizes) -> anyhow::Result<(Self, OwnedFd)> {
        let mut object_storage = MaybeUninit::uninit();
        let mut open_skeleton = open_program_variant(&mut object_storage, variant, &sizes)?;
        sizes.set_map_sizes(&mut open_skeleton.maps)?;
        let loaded_skeleton = open_skeleton.load().context("loading lb.bpf.c into the kernel")?;
        let skeleton_maps = &loaded_skeleton.maps;
        let map_handles = [
            MapHandle::try_from(&skeleton_maps.bss_state)?,
            MapHandle::try_from(&skeleton_maps.bss_servers)?,
            MapHandle::try_from(&skeleton_maps.lb_counters)?,
            MapHandle::try_from(&skeleton_maps.placement_memory)?,
            MapHandle::try_from(&skeleton_maps.server_traffic)?,
            MapHandle::try_from(&skeleton_maps.connections)?,
            MapHandle::try_from(&skeleton_maps.connection_stacks)?,
            MapHandle::try_from(&skeleton_maps.bss_opened)?,
            MapHandle::try_from(&skeleton_maps.bss_recent)?,
            MapHandle::try_from(&skeleton_maps.flow_table)?,
            MapHandle::try_from(&skeleton_maps.fragments)?,
            MapHandle::try_from(&skeleton_maps.lb_stamped_servers)?,
            MapHandle::try_from(&skeleton_maps.bss_broadcast)?,
            MapHandle::try_from(&skeleton_maps.bss_takes)?,
            MapHandle::try_from(&skeleton_maps.bss_tunnels)?,
            MapHandle::try_from(&skeleton_maps.lb_stamped_offsets)?,
            MapHandle::try_from(&skeleton_maps.bss_members)?,
        ];
        let maps = Self::new(map_handles, sizes)?;
        maps.state.store(std::mem::offset_of!(intf::lb_state, layout_version), u64::from(intf::LB_LAYOUT_VERSION));
        Ok((maps, loaded_skeleton.progs.lb.as_fd().try_clone_to_owned()?))
    }

    /// Loads another variant of the program with the same maps.
    pub fn load_program(&self, variant: &ProgramVariant) -> anyhow::Result<OwnedFd> {
        let mut object_storage = MaybeUninit::uninit();
        let mut open_skeleton = open_program_variant(&mut object_storage, variant, &self.map_sizes)?;
        for (map, map_handle) in maps_in_name_order(&mut open_skeleton.maps).into_iter().zip(&self.map_handles) {
            map.reuse_fd(map_handle.as_fd()).context("reusing a map")?;
        }
        let loaded_skeleton = open_skeleton.load().context("loading lb.bpf.c into the kernel")?;
        Ok(loaded_skeleton.progs.lb.as_fd().try_clone_to_owned()?)
    }

    /// Loads a variant of `attached_program` that also captures one service's packets ([`super::capture`]). Returns the
    /// variant and the map of its perf buffer.
    pub fn load_capturing_program(
        &self,
        attached_program: BorrowedFd<'_>,
        capture_target: &CapturedService,
    ) -> anyhow::Result<(OwnedFd, MapHandle)> {
        let mut object_storage = MaybeUninit::uninit();
        let mut open_skeleton = LbSkelBuilder::default().open(&mut object_storage).context("opening lb.bpf.o")?;
        let loaded_constants = copy_read_only_data(attached_program)?;
        // In another version of coreward, the constants have another layout and meaning.
        let version_mismatch_message =
            "the attached program was not loaded by this version of coreward: restart the daemon first";
        open_skeleton.maps.rodata.set_initial_value(&loaded_constants).context(version_mismatch_message)?;
        let constants = open_skeleton.maps.rodata_data.as_deref_mut().context("lb.bpf.o has no constants")?;
        constants.capture_in_use = true;
        constants.vlans_or_capture_in_use = true;
        match capture_target.vip.ip() {
            IpAddr::V4(vip) => {
                constants.capture_of.family = intf::ADDRESS_FAMILY_IPV4 as u8;
                constants.capture_of.vip = u32::from_ne_bytes(vip.octets());
            }
            IpAddr::V6(vip) => {
                constants.capture_of.family = intf::ADDRESS_FAMILY_IPV6 as u8;
                constants.capture_of.vip_ipv6 = zerocopy::transmute!(vip.octets());
            }
        }
        constants.capture_of.port = capture_target.vip.port().to_be();
        constants.capture_of.protocol = capture_target.protocol.iana_number();
        constants.capture_of.service = capture_target.service_index.0.into();
        constants.capture_of.length = capture_target.max_bytes_per_packet;
        for (map, map_handle) in maps_in_name_order(&mut open_skeleton.maps).into_iter().zip(&self.map_handles) {
            map.reuse_fd(map_handle.as_fd()).context("reusing a map")?;
        }
        let loaded_skeleton = open_skeleton.load().context("loading lb.bpf.c into the kernel")?;
        Ok((
            loaded_skeleton.progs.lb.as_fd().try_clone_to_owned()?,
            MapHandle::try_from(&loaded_skeleton.maps.captured)?,
        ))
    }

    /// Pins all maps in `directory`, which must be empty.
    pub fn pin(&self, directory: &Path) -> anyhow::Result<()> {
        for (name, map_handle) in LB_MAP_NAMES.iter().zip(&self.map_handles) {
            super::link::pin_object(map_handle.as_fd(), &directory.join(name))?;
        }
        Ok(())
    }

    /// Takes over the maps pinned in `directory`. Fails when a map is missing or does not have this version's layout.
    pub fn take_over(directory: &Path) -> anyhow::Result<Self> {
        let mut object_storage = MaybeUninit::uninit();
        let mut open_skeleton = LbSkelBuilder::default().open(&mut object_storage).context("opening lb.bpf.o")?;
        let pinned_sizes = read_pinned_map_sizes(directory).with_context(|| pin_version_mismatch_hint(directory))?;
        pinned_sizes.set_map_sizes(&mut open_skeleton.maps)?;
        let expected_maps = maps_in_name_order(&mut open_skeleton.maps);
        let mut map_handles = Vec::new();
        for (name, expected_map) in LB_MAP_NAMES.iter().zip(expected_maps) {
            map_handles.push(
                open_pinned_map(&directory.join(name), expected_map)
                    .with_context(|| pin_version_mismatch_hint(directory))?,
            );
        }
        let maps = Self::new(map_handles.try_into().expect("one per name"), pinned_sizes)?;
        let layout_version = maps.state.load(std::mem::offset_of!(intf::lb_state, layout_version));
        ensure!(
            layout_version == u64::from(intf::LB_LAYOUT_VERSION),
            "{}: layout version {layout_version}, expected {}. {}",
            directory.join("state").display(),
            intf::LB_LAYOUT_VERSION,
            pin_version_mismatch_hint(directory)
        );
        Ok(maps)
    }

    /// Changes the connection table in `directory` to the requested size. The flow table keeps its size. Fails when the
    /// connection table has another size and also entries in use.
    pub fn resize_connection_table(&mut self, directory: &Path, requested: BpfMapSizes) -> anyhow::Result<()> {
        if self.map_sizes.flow_table_set_count != requested.flow_table_set_count {
            let flow_entry_count = |set_count: u32| set_count * intf::FLOW_SET_ENTRIES;
            tracing::warn!(
                event = "flow-table-size-kept",
                pin_directory = %directory.display(),
                entries = flow_entry_count(self.map_sizes.flow_table_set_count),
                expected = flow_entry_count(requested.flow_table_set_count),
                "the pinned flow table keeps its size: to apply `flow_table`, run `coreward lb --detach` first"
            );
        }
        let (current_size, requested) = (self.connections.size(), requested.connection_table_size);
        if current_size == requested {
            return Ok(());
        }
        let used_entry_count = connection_memory::count_used_entries(&self.connections);
        ensure!(
            used_entry_count == 0,
            "the connection table in {} has {} entries, not {}, and {used_entry_count} of them are in use: give it the \
             old size, or detach first (forwarding stops)",
            directory.display(),
            current_size.entry_count(),
            requested.entry_count()
        );
        self.replace_map_with_zeroed_array::<intf::connection>(directory, CONNECTIONS_MAP, requested.entry_count())?;
        self.replace_map_with_zeroed_array::<intf::connection_stack>(
            directory,
            CONNECTION_STACKS_MAP,
            requested.partition_count(),
        )?;
        let [entries, stacks] = [CONNECTIONS_MAP, CONNECTION_STACKS_MAP].map(|name| self.map_fd(name));
        self.connections = connection_memory::mmap_connection_table(entries, stacks, requested)?;
        self.map_sizes.connection_table_size = requested;
        self.connections.initialise_entries();
        Ok(())
    }

    pub fn flow_table_set_count(&self) -> usize {
        self.map_sizes.flow_table_set_count as usize
    }

    pub fn counter_row_count(&self) -> usize {
        self.map_sizes.counter_row_count as usize
    }

    pub fn placement_memory_bytes(&self) -> u32 {
        self.map_sizes.placement_memory_bytes
    }

    /// Creates a map for a placement memory of `bytes` bytes, and copies the present memory's contents into it.
    pub fn create_larger_placement_memory(&self, bytes: u32) -> anyhow::Result<MapHandle> {
        let larger_map = create_mmapable_array(PLACEMENT_MEMORY_MAP, bytes + intf::PLACEMENT_MEMORY_SLACK, 1)?;
        self.placement_memory.mapped_memory().copy_to(&mmap_placement_memory(&larger_map, bytes)?);
        Ok(larger_map)
    }

    /// Loads the program with `map` as its placement memory, attaches the program by calling `switch`, and returns it.
    /// If loading or attaching fails, the previous memory remains in use.
    pub fn switch_placement_memory(
        &mut self,
        map: MapHandle,
        bytes: u32,
        variant: &ProgramVariant,
        pins: Option<&Path>,
        switch: impl FnOnce(BorrowedFd<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<OwnedFd> {
        let mapped_memory = mmap_placement_memory(&map, bytes)?;
        let previous_map_and_sizes =
            (std::mem::replace(&mut self.map_handles[map_index(PLACEMENT_MEMORY_MAP)], map), self.map_sizes);
        self.map_sizes.placement_memory_bytes = bytes;
        let switch_result = self.load_program(variant).and_then(|program| switch(program.as_fd()).map(|()| program));
        let program = match switch_result {
            Ok(program) => program,
            Err(error) => {
                (self.map_handles[map_index(PLACEMENT_MEMORY_MAP)], self.map_sizes) = previous_map_and_sizes;
                return Err(error);
            }
        };
        self.placement_memory.switch_to_larger_memory(mapped_memory, bytes);
        if let Some(pins) = pins {
            super::link::unpin_object(&pins.join(PLACEMENT_MEMORY_MAP))?;
            super::link::pin_object(self.map_fd(PLACEMENT_MEMORY_MAP), &pins.join(PLACEMENT_MEMORY_MAP))?;
        }
        Ok(program)
    }

    /// Replaces the array map that is pinned in `directory` as `name` by a new map with `entries` zeroed values of `T`.
    fn replace_map_with_zeroed_array<T>(&mut self, directory: &Path, name: &str, entries: u32) -> anyhow::Result<()> {
        let zeroed_map = create_mmapable_array(name, size_of::<T>() as u32, entries)?;
        super::link::unpin_object(&directory.join(name))?;
        super::link::pin_object(zeroed_map.as_fd(), &directory.join(name))?;
        self.map_handles[map_index(name)] = zeroed_map;
        Ok(())
    }

    fn map_fd(&self, name: &str) -> BorrowedFd<'_> {
        self.map_handles[map_index(name)].as_fd()
    }

    pub fn fragment_map(&self) -> &MapHandle {
        &self.map_handles[map_index(FRAGMENTS_MAP)]
    }

    pub fn lb_stamped_server_map(&self) -> &MapHandle {
        &self.map_handles[map_index(LB_STAMPED_SERVERS_MAP)]
    }
}

/// Creates an array map, filled with zeros, that can be mapped into memory.
fn create_mmapable_array(name: &str, value_bytes: u32, entries: u32) -> anyhow::Result<MapHandle> {
    let create_options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
        map_flags: libbpf_sys::BPF_F_MMAPABLE,
        ..Default::default()
    };
    // The kernel accepts names of at most 15 characters.
    let kernel_map_name = &name[..name.len().min(15)];
    MapHandle::create(
        MapType::Array,
        Some(kernel_map_name),
        size_of::<u32>() as u32,
        value_bytes,
        entries,
        &create_options,
    )
    .with_context(|| format!("making {name} of {entries} entries of {value_bytes} bytes"))
}

fn mmap_placement_memory(map: impl AsFd, bytes: u32) -> anyhow::Result<MmapArray<[u64]>> {
    MmapArray::mmap_slice(map, bytes as usize / size_of::<u64>()).context("mapping the placement tables")
}

/// Service whose packets `coreward capture` captures.
pub(super) struct CapturedService {
    pub vip: SocketAddr,
    pub protocol: TransportProtocol,
    pub service_index: ServiceIndex,
    pub max_bytes_per_packet: u32,
}

/// Returns a loaded program's read-only data, which holds the constants in which variants differ.
fn copy_read_only_data(program: BorrowedFd<'_>) -> anyhow::Result<Vec<u8>> {
    let id = libbpf_rs::Program::id_from_fd(program).context("the program's id")?;
    let query_options = ProgInfoQueryOptions::default().include_map_ids(true);
    let mut program_infos = ProgInfoIter::with_query_opts(query_options);
    let program_info = program_infos.find(|info| info.id == id).context("the program is not listed")?;
    for map in program_info.map_ids {
        let map = MapHandle::from_map_id(map).context("a map of the program")?;
        if map.name().to_string_lossy().ends_with(".rodata") {
            let constants = map.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).context("the program's constants")?;
            return constants.context("the program's constants are empty");
        }
    }
    anyhow::bail!("the attached program has no constants: it is not coreward's")
}

fn map_index(name: &str) -> usize {
    LB_MAP_NAMES.iter().position(|map_name| *map_name == name).expect("in the list")
}

/// Returns the sizes of the maps pinned in `directory`. Fails when a map is missing, or the connection table has an
/// invalid size.
fn read_pinned_map_sizes(directory: &Path) -> anyhow::Result<BpfMapSizes> {
    let max_entries_of = |name: &str| {
        let path = directory.join(name);
        Ok::<_, anyhow::Error>(
            MapHandle::from_pinned_path(&path).with_context(|| path.display().to_string())?.max_entries(),
        )
    };
    let connection_table_size = ConnectionTableSize::try_from(u64::from(max_entries_of(CONNECTIONS_MAP)?))?;
    let placement_memory_path = directory.join(PLACEMENT_MEMORY_MAP);
    let placement_map_bytes = MapHandle::from_pinned_path(&placement_memory_path)
        .with_context(|| placement_memory_path.display().to_string())?
        .value_size();
    Ok(BpfMapSizes {
        flow_table_set_count: max_entries_of(FLOW_TABLE_MAP)?,
        connection_table_size,
        placement_memory_bytes: placement_map_bytes.saturating_sub(intf::PLACEMENT_MEMORY_SLACK),
        counter_row_count: max_entries_of(COUNTERS_MAP)? / intf::LB_COUNTERS_PER_ROW,
    })
}

fn pin_version_mismatch_hint(directory: &Path) -> String {
    format!(
        "What is pinned in {directory} was not made by this version of coreward: `coreward lb` of this version takes \
         its place once it has its configuration, and until then it forwards",
        directory = directory.display()
    )
}

/// Opens the map that is pinned at `path`. Fails when its type or sizes differ from those of the map `expected`.
fn open_pinned_map(path: &Path, expected: &OpenMapMut<'_>) -> anyhow::Result<MapHandle> {
    let map = MapHandle::from_pinned_path(path).with_context(|| path.display().to_string())?;
    let pinned_layout = (map.map_type(), map.key_size(), map.value_size(), map.max_entries());
    let expected_layout = (expected.map_type(), expected.key_size(), expected.value_size(), expected.max_entries());
    ensure!(
        pinned_layout == expected_layout,
        "{}: (type, key size, value size, entries) is {pinned_layout:?}, expected {expected_layout:?}",
        path.display()
    );
    Ok(map)
}

/// Removes the pins that [`LoadBalancerMaps::pin`] made in this or another version. The link's pin stays.
pub(super) fn unpin_maps(directory: &Path) -> anyhow::Result<()> {
    for entry in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let path = entry?.path();
        if !path.ends_with("link") {
            super::link::unpin_object(&path)?;
        }
    }
    Ok(())
}

/// Returns whether the attached program, which may be of another version, has one row of counters per CPU, as generic
/// XDP requires.
pub(super) fn are_pinned_counters_per_cpu(directory: &Path) -> anyhow::Result<bool> {
    let state_path = directory.join("state");
    let state_map = MapHandle::from_pinned_path(&state_path).with_context(|| state_path.display().to_string())?;
    let state_bytes = state_map.lookup(&0u32.to_ne_bytes(), MapFlags::ANY)?.context("an empty map")?;
    let flag_offset = std::mem::offset_of!(intf::lb_state, counters_by_cpu);
    let counters_by_cpu_word = state_bytes
        .get(flag_offset..flag_offset + size_of::<u64>())
        .with_context(|| format!("{}: too short", state_path.display()))?;
    Ok(counters_by_cpu_word.iter().any(|byte| *byte != 0))
}

/// Removes the pins that [`LoadBalancerMaps::pin`] made, and the directory.
pub(super) fn unpin_maps_and_directory(directory: &Path) -> anyhow::Result<()> {
    unpin_maps(directory)?;
    match fs::remove_dir(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| directory.display().to_string())
        }
        _ => Ok(()),
    }
}

pub(super) fn has_pinned_map(directory: &Path) -> bool {
    LB_MAP_NAMES.iter().any(|name| directory.join(name).exists())
}

fn open_program_variant<'obj>(
    storage: &'obj mut MaybeUninit<libbpf_rs::OpenObject>,
    variant: &ProgramVariant,
    sizes: &BpfMapSizes,
) -> anyhow::Result<OpenLbSkel<'obj>> {
    let mut open_skeleton = LbSkelBuilder::default().open(storage).context("opening lb.bpf.o")?;
    let constants = open_skeleton.maps.rodata_data.as_deref_mut().context("lb.bpf.o has no constants")?;
    constants.rules_in_use =
        bits_or_default_if_zero(variant.required_features.placement_rule_bits, DEFAULT_PLACEMENT_RULE_BITS);
    constants.modes_in_use =
        bits_or_default_if_zero(variant.required_features.consistency_mode_bits, DEFAULT_CONSISTENCY_MODE_BITS);
    constants.timestamps_off_in_use = variant.required_features.has_tcp_without_timestamps;
    constants.timestamps_lb_in_use = variant.required_features.has_lb_stamping;
    constants.other_balancer_in_use = variant.required_features.has_migrating_service;
    constants.lb_stamping_by_ticks = variant.lb_stamping_clock == LbStampingClock::DaemonTicks;
    constants.packets_read_clock = variant.packets_read_clock;
    constants.udp_in_use = variant.required_features.has_udp_service;
    constants.ipv6_in_use = variant.required_features.has_ipv6_service;
    constants.forwarding_in_use =
        bits_or_default_if_zero(variant.required_features.forwarding_mode_bits, DEFAULT_FORWARDING_MODE_BITS);
    constants.traffic_in_use = variant.counts_server_traffic;
    constants.vlans_in_use = variant.vlan_settings.uses_tags();
    constants.vlans_or_capture_in_use = constants.vlans_in_use;
    constants.vip_vlan = variant.vlan_settings.vip_vlan.id_or_zero();
    constants.counters_by_cpu = variant.has_per_cpu_counters;
    constants.connection_partition_mask = sizes.connection_table_size.partition_count() - 1;
    constants.placement_memory_mask = sizes.placement_memory_bytes - 1;
    constants.counter_row_mask = sizes.counter_row_count - 1;
    constants.flow_set_count = sizes.flow_table_set_count;
    for (reason, rates) in variant.broadcast_limits.into_iter().enumerate() {
        let source_limit = &mut constants.broadcast_per_source[reason];
        (source_limit.interval_ns, source_limit.burst_ns) = ns_per_token_and_burst(rates.source_limit);
        let service_limit = &mut constants.broadcast_per_service[reason];
        (service_limit.interval_ns, service_limit.burst_ns) = ns_per_token_and_burst(rates.service_limit);
        let total_limit = &mut constants.broadcast_total[reason];
        (total_limit.interval_ns, total_limit.burst_ns) = ns_per_token_and_burst(rates.total_limit);
    }
    Ok(open_skeleton)
}

fn bits_or_default_if_zero(bits: u32, default: u32) -> u32 {
    if bits == 0 { default } else { bits }
}

/// Converts a rate to fields of `struct token_bucket` (`bpf/lb/broadcast.h`), namely ns per token and the burst in ns.
fn ns_per_token_and_burst(rate: PacketRateLimit) -> (u64, u64) {
    let ns_per_token = 1_000_000_000 / u64::from(rate.packets_per_second.max(1));
    (ns_per_token, ns_per_token * u64::from(rate.burst_packets.max(1) - 1))
}
