//! Loads and configures `bpf/server/server.bpf.c` at a server's device, and takes over the state of an earlier process.
//!
//! The maps are pinned below one directory of a bpffs, so that they outlive the process:
//!
//! ```text
//! server/state               struct server_state: keys, services, counters, samples
//! server/held_timestamps     state of the PAWS clamp
//! server/half_open_indexes   stateful services: indexes of connections that have no socket yet
//! server/connection_indexes  stateful services: indexes of connections with a socket
//! server/chained_servers     MAC addresses of servers for daisy chaining
//! server/rss_mapping         struct rss_mapping, shared with steer.bpf.c
//! server/ingress, egress     the links (before kernel 6.6 the clsact qdisc holds the programs instead)
//! ```

mod rss_samples;

use std::fs;
use std::mem::{MaybeUninit, offset_of};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use anyhow::{Context as _, ensure};
use coreward_intf as intf;
use coreward_model::consistency::{ConsistencyMode, ServiceSettings};
use coreward_model::cookie::{CookieKey, CookieKeyIndex, FleetCookieKeys};
use coreward_model::rss::RssConfig;
use coreward_model::{ServerId, ServiceAddress};
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle, OpenMapMut};
use rand::rand_core::UnwrapErr;
use rand::rngs::SysRng;

use crate::lru_map_sizes;
use crate::mac::MacAddress;
use crate::mmap_array::MmapArray;
use crate::pins;
use crate::rcu::wait_until_running_programs_end;
use crate::service_slots;
use crate::skeleton::server::{OpenServerSkel, ServerSkel, ServerSkelBuilder};
use crate::tc::{self, PacketDirection, TcAttachMechanism};

/// Names of the counters that [`ServerPrograms::counters`] returns.
pub use coreward_intf::SERVER_COUNTER_NAMES as COUNTER_NAMES;

/// Number of counters of the server's programs.
pub const SERVER_COUNTER_COUNT: usize = intf::SERVER_COUNTER_COUNT as usize;

/// Options with which the server's programs are loaded.
#[derive(Debug, Clone)]
pub struct ServerProgramOptions {
    /// Index of the network device that receives the services' packets.
    pub interface_index: u32,
    /// Directory in a bpffs for pinned objects.
    pub pin_directory: PathBuf,
    /// Whether all arriving TCP SYNs are sampled, not only SYNs to services. It cannot be changed after loading.
    pub sample_every_syn: bool,
}

/// BPF programs at the server's device, and the memory shared with them. They continue to run after the value is
/// dropped.
#[derive(Debug)]
pub struct ServerPrograms {
    options: ServerProgramOptions,
    attach_mechanism: TcAttachMechanism,
    is_state_taken_over: bool,
    ingress_program: OwnedFd,
    egress_program: OwnedFd,
    rss_map_fd: OwnedFd,
    state: MmapArray<intf::server_state>,
    counter_row_count: usize,
    rss_mapping: MmapArray<intf::rss_mapping>,
    chained_server_entries: MmapArray<ChainedServerEntries>,
    has_ipv6_outer_headers: bool,
    /// Maps of the programs that will replace another version's programs. They are pinned when the services are known.
    pending_upgrade_maps: Option<[OwnedFd; SERVER_MAP_NAMES.len()]>,
}

const FIRST_LAYOUT_VERSION_WITH_KEYS: u64 = 3;

type ChainedServerEntries = [intf::server_entry; intf::SERVER_ID_COUNT as usize];

impl ServerPrograms {
    /// Loads the programs and attaches them to the device. They take over the keys, services and counters that an
    /// earlier process pinned, and replace the earlier programs atomically. Programs of another layout version continue
    /// to run until [`set_services`](Self::set_services) has configured the new programs, which take over only the
    /// keys. Fails when the pin directory is not on a bpffs, or the kernel rejects the programs or links. Also fails
    /// when the device has programs that are pinned in another directory.
    pub fn attach(options: ServerProgramOptions) -> anyhow::Result<Self> {
        let server_directory = options.pin_directory.join("server");
        ensure_no_other_stamping_program(options.interface_index, &options.pin_directory)?;
        fs::create_dir_all(&server_directory).with_context(|| server_directory.display().to_string())?;
        let state_path = server_directory.join("state");
        let mut object_storage = MaybeUninit::uninit();
        if let Some(problem) = find_state_takeover_problem(&state_path)? {
            tracing::warn!(
                event = "upgrade-pending",
                pin_directory = %options.pin_directory.display(),
                reason = %problem,
                "the pinned programs of another version stay attached until the controller sends the services"
            );
            let loaded_skeleton = load_programs(&mut object_storage, options.sample_every_syn, None)?;
            let mut programs = Self::new(&loaded_skeleton, options, TcAttachMechanism::Tcx, false)?;
            programs.copy_keys_from_old_state(&state_path)?;
            programs.pending_upgrade_maps = Some(maps_in_name_order(&loaded_skeleton)?);
            return Ok(programs);
        }
        let is_state_taken_over = state_path.exists();
        if !is_state_taken_over {
            unpin_maps(&server_directory)?;
        }
        let loaded_skeleton = load_programs(&mut object_storage, options.sample_every_syn, Some(&server_directory))?;
        let mut programs = Self::new(&loaded_skeleton, options, TcAttachMechanism::Tcx, is_state_taken_over)?;
        programs.attach_programs()?;
        Ok(programs)
    }

    fn server_pin_directory(&self) -> PathBuf {
        self.options.pin_directory.join("server")
    }

    /// Attaches the programs to the device, in place of an earlier process's programs.
    fn attach_programs(&mut self) -> anyhow::Result<()> {
        let (server_directory, interface_index) = (self.server_pin_directory(), self.options.interface_index);
        self.attach_mechanism = tc::attach_tc_program(
            self.ingress_program.as_fd(),
            interface_index,
            PacketDirection::Ingress,
            &server_directory.join("ingress"),
        )?;
        tc::attach_tc_program(
            self.egress_program.as_fd(),
            interface_index,
            PacketDirection::Egress,
            &server_directory.join("egress"),
        )?;
        Ok(())
    }

    /// Copies the cookie keys and the time key from pinned state with another layout, so that issued cookies remain
    /// valid and TSvals continue. The keys have the same offsets in all layouts since
    /// [`FIRST_LAYOUT_VERSION_WITH_KEYS`]. If the layout is older, the cookies issued with it become invalid.
    fn copy_keys_from_old_state(&mut self, state_path: &Path) -> anyhow::Result<()> {
        let state_map = MapHandle::from_pinned_path(state_path).with_context(|| state_path.display().to_string())?;
        let old_state = state_map.lookup(&0u32.to_ne_bytes(), MapFlags::ANY)?.context("an empty map")?;
        let version_offset = offset_of!(intf::server_state, layout_version);
        let layout_version = old_state
            .get(version_offset..version_offset + size_of::<u64>())
            .map(|bytes| bytes.try_into().expect("eight bytes"));
        if layout_version.map(u64::from_ne_bytes) < Some(FIRST_LAYOUT_VERSION_WITH_KEYS) {
            tracing::warn!(
                event = "cookies-incompatible",
                pin = %state_path.display(),
                "the pinned state of another version has an older cookie layout: existing connections with old \
                 cookies break"
            );
            return Ok(());
        }
        for (key_offset, key_length) in
            [(COOKIE_KEYS_OFFSET, size_of::<intf::fleet_keys>()), (TIME_KEY_OFFSET, size_of::<intf::cookie_key>())]
        {
            let key_bytes = old_state
                .get(key_offset..key_offset + key_length)
                .with_context(|| format!("{}: too short", state_path.display()))?;
            self.state.write(key_offset, key_bytes);
        }
        Ok(())
    }

    /// Replaces the programs of another version, if they are still attached.
    fn commit_upgrade(&mut self) -> anyhow::Result<()> {
        let Some(maps) = self.pending_upgrade_maps.take() else { return Ok(()) };
        self.attach_programs()?;
        let server_directory = self.server_pin_directory();
        for entry in fs::read_dir(&server_directory)? {
            let pin_path = entry?.path();
            if !SERVER_LINK_NAMES.iter().any(|link| pin_path.ends_with(link)) {
                fs::remove_file(&pin_path).with_context(|| pin_path.display().to_string())?;
            }
        }
        for (map, name) in maps.iter().zip(SERVER_MAP_NAMES) {
            tc::pin_object(map.as_fd(), &server_directory.join(name))?;
        }
        tracing::info!(
            event = "upgrade-finished",
            pin_directory = %self.options.pin_directory.display(),
            "this version's programs have replaced the programs of another version"
        );
        Ok(())
    }

    /// Loads the programs without attaching or pinning them, for tests with `BPF_PROG_TEST_RUN` and for
    /// [`tc::attach_until_drop`].
    pub fn load_unattached(sample_every_syn: bool) -> anyhow::Result<Self> {
        let mut object_storage = MaybeUninit::uninit();
        let loaded_skeleton = load_programs(&mut object_storage, sample_every_syn, None)?;
        let options = ServerProgramOptions { interface_index: 0, pin_directory: PathBuf::new(), sample_every_syn };
        Self::new(&loaded_skeleton, options, TcAttachMechanism::Tcx, false)
    }

    fn new(
        skeleton: &ServerSkel<'_>,
        options: ServerProgramOptions,
        attachment: TcAttachMechanism,
        is_taken_over: bool,
    ) -> anyhow::Result<Self> {
        let skeleton_maps = &skeleton.maps;
        let state = MmapArray::<intf::server_state>::new(&skeleton_maps.bss).context("mapping server_state")?;
        if !is_taken_over {
            let time_key = CookieKey::random(&mut UnwrapErr(SysRng));
            state.write(TIME_KEY_OFFSET, &time_key.to_bpf_key());
        }
        state.store(offset_of!(intf::server_state, layout_version), intf::SERVER_LAYOUT_VERSION.into());
        Ok(Self {
            options,
            attach_mechanism: attachment,
            is_state_taken_over: is_taken_over,
            ingress_program: skeleton.progs.server_ingress.as_fd().try_clone_to_owned()?,
            egress_program: skeleton.progs.server_egress.as_fd().try_clone_to_owned()?,
            rss_map_fd: skeleton_maps.rss_mapping.as_fd().try_clone_to_owned()?,
            state,
            counter_row_count: libbpf_rs::num_possible_cpus()?.min(intf::MAX_CPUS as usize),
            rss_mapping: MmapArray::new(&skeleton_maps.rss_mapping).context("mapping rss_mapping")?,
            chained_server_entries: MmapArray::new(&skeleton_maps.bss_chained).context("mapping chained_servers")?,
            has_ipv6_outer_headers: false,
            pending_upgrade_maps: None,
        })
    }

    /// Returns whether the programs have taken over the pinned state of an earlier process.
    pub fn is_state_taken_over(&self) -> bool {
        self.is_state_taken_over
    }

    /// Returns the mechanism by which the programs are attached.
    pub fn attach_mechanism(&self) -> TcAttachMechanism {
        self.attach_mechanism
    }

    /// Returns the file descriptor of the program for one direction of packets, for `BPF_PROG_TEST_RUN`.
    pub fn program_for_direction(&self, direction: PacketDirection) -> BorrowedFd<'_> {
        match direction {
            PacketDirection::Ingress => self.ingress_program.as_fd(),
            PacketDirection::Egress => self.egress_program.as_fd(),
        }
    }

    /// Returns the map with the server's RSS configuration, which is shared with `steer.bpf.c`.
    pub fn rss_map_fd(&self) -> BorrowedFd<'_> {
        self.rss_map_fd.as_fd()
    }

    /// Sets the address family of outer headers to the family of `address`, this server's address. The default is IPv4.
    /// The next call of [`set_services`](Self::set_services) applies the change.
    pub fn set_outer_family_from_address(&mut self, address: IpAddr) {
        self.has_ipv6_outer_headers = address.is_ipv6();
    }

    /// Replaces this server's services atomically. `services` has each service's address, the server's id in the
    /// service, and the service's settings. Fails when there are too many services, a service has port 0, or a service
    /// is listed twice.
    pub fn set_services(&mut self, services: &[(ServiceAddress, ServerId, ServiceSettings)]) -> anyhow::Result<()> {
        let slot_number_for = |id, mode| encode_slot_number(id, mode, self.has_ipv6_outer_headers);
        let addresses_with_numbers: Vec<_> =
            services.iter().map(|(address, id, mode)| (*address, slot_number_for(*id, *mode))).collect();
        let service_directory = service_slots::build_server_directory(&addresses_with_numbers)?;
        let idle_half = self.active_service_directory_half() ^ 1;
        self.state.write(service_directory_half_offset(idle_half), &*service_directory);
        self.state.store(ACTIVE_DIRECTORY_HALF_OFFSET, idle_half);
        wait_until_running_programs_end()?;
        self.commit_upgrade()
    }

    /// Returns whether this host forwarded the service's last SYN-ACK instead of sending it itself. If so, the
    /// listening socket is in another network namespace.
    pub fn forwards_syn_acks(&self, service: &ServiceAddress) -> bool {
        let service_word = service_slots::service_hash_word(&service.to_service_key());
        let slot_offset = service_slots::forwarded_service_index(service_word) * size_of::<u64>();
        self.state.load(offset_of!(intf::server_state, forwarded_services) + slot_offset) == service_word
    }

    fn active_service_directory_half(&self) -> u64 {
        self.state.load(ACTIVE_DIRECTORY_HALF_OFFSET) & 1
    }

    /// Sets the MAC address of another server, to which this server forwards packets of that server's connections. Only
    /// packets into which the load balancer has written that server are forwarded (`bpf/server/daisy_chain.h`). With
    /// `None`, the address is unknown, and packets for that server are not forwarded.
    pub fn set_other_server_mac(&mut self, server: ServerId, mac: Option<MacAddress>) {
        let MacAddress(mac_address) = mac.unwrap_or(MacAddress([0; 6]));
        let server_flags = if mac.is_some() { intf::SERVER_RESOLVED as u16 } else { 0 };
        let server_entry = intf::server_entry { mac_address, flags: server_flags };
        self.chained_server_entries.write(usize::from(server.get()) * size_of::<intf::server_entry>(), &server_entry);
    }

    /// Returns whether any service is configured.
    pub fn has_services(&self) -> bool {
        let service_directory = self
            .state
            .read::<intf::service_directory>(service_directory_half_offset(self.active_service_directory_half()));
        service_directory.slots.iter().any(|slot| slot.key.port != 0)
    }

    /// Sets the fleet's cookie keys. Packets with a TSval from `switch_ms` on are stamped with the current key, and
    /// packets with an earlier TSval with the other key. `switch_ms` is a time in ms of the server's own clock, within
    /// 2^31 ms of now. When the current key changes, `switch_ms` must be later than the TSval of every sent packet, and
    /// the whole fleet must have both keys.
    pub fn set_cookie_keys(&mut self, keys: &FleetCookieKeys, switch_ms: u32) {
        let bpf_keys = keys.keys.map(|key| key.to_bpf_key());
        let switch_and_current_word = u64::from(switch_ms) << 32 | keys.current_key_index.get() as u64;
        // The keys are written first, because the new current key replaces a key that is not in use.
        self.state.write(COOKIE_KEYS_OFFSET, &bpf_keys);
        self.state.store(COOKIE_KEYS_OFFSET + offset_of!(intf::fleet_keys, current), switch_and_current_word);
    }

    /// Returns the keys and `switch_ms` set by [`set_cookie_keys`](Self::set_cookie_keys), even if an earlier process
    /// set them.
    pub fn cookie_keys_and_switch_ms(&self) -> (FleetCookieKeys, u32) {
        let stored_keys = self.state.read::<intf::fleet_keys>(COOKIE_KEYS_OFFSET);
        let current_index = if stored_keys.current == 0 { CookieKeyIndex::First } else { CookieKeyIndex::Second };
        (
            FleetCookieKeys {
                keys: stored_keys.key.map(|key| CookieKey { k0: key.k0, k1: key.k1 }),
                current_key_index: current_index,
            },
            stored_keys.switch_ms,
        )
    }

    /// Limits the ages of the times at which TSvals were last clamped to 2^29 ms. `now_ms` is the server's own clock.
    /// It must be called at least every few days, because the programs compare 32-bit times.
    pub fn limit_tsval_clamp_ages(&mut self, now_ms: u32) {
        let first_offset = offset_of!(intf::server_state, last_clamp_tsval_ms);
        for group in 0..intf::CLAMP_GROUPS as usize {
            let clamp_time_ms = self.state.atomic_u32(first_offset + group * size_of::<u32>());
            let stored_ms = clamp_time_ms.load(Ordering::Relaxed);
            let age_ms = now_ms.wrapping_sub(stored_ms) as i32;
            // A time that seems to be in the future was never set. It is 0, and the clock is beyond 2^31 ms.
            if !(-MAX_PAWS_CLAMP_LEAD_MS..=MAX_PAWS_CLAMP_AGE_MS).contains(&age_ms) {
                let oldest_allowed_ms = now_ms.wrapping_sub(MAX_PAWS_CLAMP_AGE_MS as u32);
                // The exchange fails if a packet was clamped since, which made the stored time newer.
                let _ =
                    clamp_time_ms.compare_exchange(stored_ms, oldest_allowed_ms, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }

    /// Returns the key that masks the time part of the TSvals that this server stamps. It is random, and is set when
    /// the state is created.
    pub fn time_key(&self) -> CookieKey {
        let stored_key = self.state.read::<intf::cookie_key>(TIME_KEY_OFFSET);
        CookieKey { k0: stored_key.k0, k1: stored_key.k1 }
    }

    /// Sets the server's RSS configuration for the sampling and steering of SYNs, or `None` if it is unknown.
    /// `generation` is the number that the agent gave this configuration.
    ///
    /// During the change, the programs predict no receive queue. A program that is already reading the old table may
    /// read parts of the new table. Statistics over many SYNs tolerate such a wrong sample.
    pub fn set_rss_config(&mut self, rss: Option<&RssConfig>, generation: u32) {
        // The map's first word holds entry_count in the lower half and generation in the upper half.
        let encode_header_word = |entry_count: u32| u64::from(generation) << 32 | u64::from(entry_count);
        self.rss_mapping.store(0, encode_header_word(0));
        if let Some(rss) = rss {
            let mut rss_mapping = rss.to_bpf_mapping(generation);
            let entry_count = std::mem::take(&mut rss_mapping.entry_count);
            self.rss_mapping.write(0, &*rss_mapping);
            self.rss_mapping.store(0, encode_header_word(entry_count));
        }
    }

    /// Returns the counters in the order of [`COUNTER_NAMES`]. They count from the creation of the state.
    pub fn counters(&self) -> [u64; SERVER_COUNTER_COUNT] {
        let mut counter_sums = [0u64; SERVER_COUNTER_COUNT];
        let counters_offset = offset_of!(intf::server_state, counters);
        for row in 0..self.counter_row_count {
            let row_offset = counters_offset + row * size_of::<intf::server_counters>();
            for (index, sum) in counter_sums.iter_mut().enumerate() {
                *sum = sum.wrapping_add(self.state.load(row_offset + index * size_of::<u64>()));
            }
        }
        counter_sums
    }

    /// Returns one counter, which counts from the creation of the state.
    pub fn counter(&self, counter_value: intf::server_counter) -> u64 {
        self.counters()[counter_value as usize]
    }

    /// Returns the sequence number of the newest SYN sample, or 0 if no SYN has been sampled.
    pub fn newest_syn_sample_sequence(&self) -> u32 {
        rss_samples::newest_sample_sequence(&self.state)
    }

    /// Returns the SYN samples whose sequence numbers are after `previous_sequence`, or all samples if
    /// `previous_sequence` is 0, the oldest first. Only the last [`RSS_SAMPLES`](intf::RSS_SAMPLES) samples are stored,
    /// so older samples may be missing.
    pub fn syn_samples_after_sequence(&self, previous_sequence: u32) -> Vec<intf::rss_sample> {
        rss_samples::rss_samples_after_sequence(&self.state, previous_sequence)
    }

    /// Detaches the programs and removes their pins. Open connections with stamped packets then break.
    pub fn detach_and_unpin(self) -> anyhow::Result<()> {
        detach_and_unpin(self.options.interface_index, &self.options.pin_directory)
    }
}

/// Detaches the programs of [`ServerPrograms::attach`] from a device and removes their pins.
pub fn detach_and_unpin(interface_index: u32, pin_directory: &Path) -> anyhow::Result<()> {
    let server_directory = pin_directory.join("server");
    tc::detach_tc_program(interface_index, PacketDirection::Egress, &server_directory.join("egress"))?;
    tc::detach_tc_program(interface_index, PacketDirection::Ingress, &server_directory.join("ingress"))?;
    unpin_maps(&server_directory)?;
    fs::remove_dir(&server_directory).with_context(|| server_directory.display().to_string())
}

/// Checks that no other stamping program is attached to the device. Two such programs would overwrite each other's
/// cookies, so that no connection could open. (Before Linux 6.6, the fixed handle in the clsact qdisc excludes a second
/// program.)
fn ensure_no_other_stamping_program(interface_index: u32, pin_directory: &Path) -> anyhow::Result<()> {
    for other_pin_directory in pins::find_other_pin_directories(pin_directory, "server/egress") {
        let egress_pin = other_pin_directory.join("server").join("egress");
        ensure!(
            !tc::is_tc_program_attached(interface_index, PacketDirection::Egress, &egress_pin).unwrap_or(false),
            "what is pinned in {} is at the interface of index {interface_index} already: expected `pin_directory` to \
             be that, or first `coreward agent --detach` with that in its file",
            other_pin_directory.display()
        );
    }
    Ok(())
}

/// Maximum age in ms of the time at which a TSval was last clamped. An older time is set to this age.
const MAX_PAWS_CLAMP_AGE_MS: i32 = 1 << 29;
/// Maximum time in ms by which the time of the last clamp may be in the future, because CPUs' clocks may differ.
const MAX_PAWS_CLAMP_LEAD_MS: i32 = 60_000;

const COOKIE_KEYS_OFFSET: usize = offset_of!(intf::server_state, keys);
const TIME_KEY_OFFSET: usize = offset_of!(intf::server_state, time_key);
const ACTIVE_DIRECTORY_HALF_OFFSET: usize =
    offset_of!(intf::server_state, directories) + offset_of!(intf::service_directories, active);

fn service_directory_half_offset(half: u64) -> usize {
    offset_of!(intf::server_state, directories)
        + offset_of!(intf::service_directories, half)
        + half as usize * size_of::<intf::service_directory>()
}

const SERVER_MAP_NAMES: [&str; 6] =
    ["state", "held_timestamps", "half_open_indexes", "connection_indexes", "chained_servers", "rss_mapping"];

const SERVER_LINK_NAMES: [&str; 2] = ["ingress", "egress"];

fn maps_in_name_order(skeleton: &ServerSkel<'_>) -> anyhow::Result<[OwnedFd; SERVER_MAP_NAMES.len()]> {
    let skeleton_maps = &skeleton.maps;
    let map_fds = [
        skeleton_maps.bss.as_fd(),
        skeleton_maps.held_timestamps.as_fd(),
        skeleton_maps.half_open_indexes.as_fd(),
        skeleton_maps.connection_indexes.as_fd(),
        skeleton_maps.bss_chained.as_fd(),
        skeleton_maps.rss_mapping.as_fd(),
    ];
    let owned_fds: Vec<OwnedFd> = map_fds.iter().map(BorrowedFd::try_clone_to_owned).collect::<Result<_, _>>()?;
    Ok(owned_fds.try_into().expect("one per name"))
}

/// Encodes the server's id and the flags of the service's settings as the number in the service's directory slot.
fn encode_slot_number(id: ServerId, mode: ServiceSettings, has_ipv6_outer_header: bool) -> u32 {
    let encapsulates = mode.forwarding.encapsulates();
    let flag_if = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
    u32::from(id.get())
        | flag_if(
            mode.servers_stamp_packets() && mode.consistency == ConsistencyMode::Stateful,
            intf::SERVER_NUMBER_STATEFUL,
        )
        | flag_if(!mode.servers_stamp_packets(), intf::SERVER_NUMBER_TIMESTAMPS_OFF)
        | flag_if(mode.packets_carry_previous_server_id(), intf::SERVER_NUMBER_CHAINED)
        | flag_if(encapsulates, intf::SERVER_NUMBER_ENCAPSULATED)
        | flag_if(encapsulates && has_ipv6_outer_header, intf::SERVER_NUMBER_OUTER_IPV6)
}

fn unpin_maps(server_directory: &Path) -> anyhow::Result<()> {
    SERVER_MAP_NAMES.iter().try_for_each(|map| unpin_if_present(&server_directory.join(map)))
}

fn unpin_if_present(path: &Path) -> anyhow::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error).context(path.display().to_string()),
        _ => Ok(()),
    }
}

/// Returns the reason why [`ServerPrograms::attach`] cannot take over the state pinned below `pin_directory`. Returns
/// `None` if it can, or if nothing is pinned. Fails when the pins cannot be opened.
pub fn find_takeover_problem(pin_directory: &Path) -> anyhow::Result<Option<String>> {
    find_state_takeover_problem(&pin_directory.join("server").join("state"))
}

fn find_state_takeover_problem(path: &Path) -> anyhow::Result<Option<String>> {
    if !path.exists() {
        return Ok(None);
    }
    let state_map = MapHandle::from_pinned_path(path).with_context(|| path.display().to_string())?;
    let (found_bytes, expected_bytes) = (state_map.value_size() as usize, size_of::<intf::server_state>());
    if found_bytes != expected_bytes {
        return Ok(Some(format!(
            "{}: {found_bytes} bytes of another version, expected {expected_bytes}",
            path.display()
        )));
    }
    let server_state = MmapArray::<intf::server_state>::new(&state_map)?;
    let (found_version, expected_version) =
        (server_state.load(offset_of!(intf::server_state, layout_version)), intf::SERVER_LAYOUT_VERSION.into());
    Ok((found_version != expected_version)
        .then(|| format!("{}: layout {found_version}, expected {expected_version}", path.display())))
}

fn load_programs<'object>(
    storage: &'object mut MaybeUninit<libbpf_rs::OpenObject>,
    sample_every_syn: bool,
    pins: Option<&Path>,
) -> anyhow::Result<ServerSkel<'object>> {
    let mut open_skeleton: OpenServerSkel<'_> =
        ServerSkelBuilder::default().open(storage).context("bpf/server/server.bpf.c")?;
    let rodata = open_skeleton.maps.rodata_data.as_deref_mut().context("server.bpf.c without read-only data")?;
    rodata.sample_every_syn = sample_every_syn.into();
    let map_pin_path = |name: &str| pins.map(|pins| pins.join(name));
    for (map, name, capacity) in [
        (&mut open_skeleton.maps.held_timestamps, "held_timestamps", intf::MAX_CLAMPED_TIMESTAMPS),
        (&mut open_skeleton.maps.half_open_indexes, "half_open_indexes", intf::MAX_HALF_OPEN_INDEXES),
    ] {
        lru_map_sizes::set_lru_capacity(map, capacity, map_pin_path(name).as_deref())?;
    }
    if let Some(pins) = pins {
        let skeleton_maps = &mut open_skeleton.maps;
        let maps_in_name_order: [&mut OpenMapMut<'_>; SERVER_MAP_NAMES.len()] = [
            &mut skeleton_maps.bss,
            &mut skeleton_maps.held_timestamps,
            &mut skeleton_maps.half_open_indexes,
            &mut skeleton_maps.connection_indexes,
            &mut skeleton_maps.bss_chained,
            &mut skeleton_maps.rss_mapping,
        ];
        for (map, name) in maps_in_name_order.into_iter().zip(SERVER_MAP_NAMES) {
            map.set_pin_path(pins.join(name)).context(name)?;
        }
    }
    let loaded_skeleton = open_skeleton.load().context("the kernel rejected bpf/server/server.bpf.c")?;
    ensure!(
        loaded_skeleton.maps.bss.value_size() as usize == size_of::<intf::server_state>(),
        "server.bpf.c keeps more than server_state"
    );
    Ok(loaded_skeleton)
}
