//! `bpf/server/server.bpf.c` at a server's device: loaded, attached, pinned, taken over, filled, read.
//!
//! The state of packets is pinned below one directory of a bpffs, so that it outlives the process:
//!
//! ```text
//! server/state               struct server_state: keys, services, counters, samples
//! server/held_timestamps     state of the PAWS clamp
//! server/half_open_indexes   stateful services: indexes of connections without a socket so far
//! server/connection_indexes  stateful services: indexes of connections with a socket
//! server/chained_servers     MAC addresses of servers for daisy chaining
//! server/rss_mapping         struct rss_mapping, shared with steer.bpf.c
//! server/ingress, egress     the links (not below kernel 6.6: there the clsact qdisc holds the programs)
//! ```

use std::fs;
use std::mem::{MaybeUninit, offset_of};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use anyhow::{Context as _, ensure};
use coreward_intf as intf;
use coreward_model::consistency::{Consistency, ServiceMode};
use coreward_model::cookie::{CookieKey, FleetKeys, KeyIndex};
use coreward_model::rss::Rss;
use coreward_model::{ServerId, ServiceAddress};
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle, OpenMapMut};
use rand::rand_core::UnwrapErr;
use rand::rngs::SysRng;

use crate::lru;
use crate::mac::MacAddress;
use crate::mmap_array::MmapArray;
use crate::pins;
use crate::rcu::wait_for_programs;
use crate::service_slots;
use crate::skeleton::server::{OpenServerSkel, ServerSkel, ServerSkelBuilder};
use crate::tc::{self, Attachment, Direction};

/// Names of the counters of [`ServerPrograms::counters`].
pub use coreward_intf::SERVER_COUNTER_NAMES as COUNTER_NAMES;

/// Number of counters.
pub const COUNTERS: usize = intf::SERVER_COUNTER_COUNT as usize;

/// Options of the server's programs.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Index of the device of the services' packets.
    pub interface_index: u32,
    /// Pin directory, below a bpffs.
    pub pin_directory: PathBuf,
    /// Sample every TCP SYN that arrives, not only those to services (fixed at load time).
    pub sample_every_syn: bool,
}

/// The programs at the device, and the memory shared with them. After a drop they continue to work.
#[derive(Debug)]
pub struct ServerPrograms {
    options: ServerOptions,
    attachment: Attachment,
    is_taken_over: bool,
    ingress: OwnedFd,
    egress: OwnedFd,
    rss_map: OwnedFd,
    state: MmapArray<intf::server_state>,
    counter_rows: usize,
    rss: MmapArray<intf::rss_mapping>,
    chained_servers: MmapArray<ChainedServers>,
    /// Whether encapsulated packets have IPv6 outer headers.
    outer_ipv6: bool,
    /// Maps that are pinned once the services are known; programs of another version work until then.
    pending_upgrade: Option<[OwnedFd; MAPS.len()]>,
}

const FIRST_LAYOUT_WITH_KEYS: u64 = 3;

type ChainedServers = [intf::server_entry; intf::SERVER_ID_COUNT as usize];

impl ServerPrograms {
    /// Loads the programs and attaches them to the device. State pinned by an earlier process is taken over with keys,
    /// services and counters, and the old programs are replaced atomically. Programs of another version with another
    /// layout continue until [`set_services`](Self::set_services) has configured these, which then replace them, with
    /// their keys. Fails when the pin directory is not on a bpffs, programs that are pinned elsewhere are at the
    /// device, or the kernel refuses programs or links.
    pub fn attach(options: ServerOptions) -> anyhow::Result<Self> {
        let pins = options.pin_directory.join("server");
        ensure_only_stamper(options.interface_index, &options.pin_directory)?;
        fs::create_dir_all(&pins).with_context(|| pins.display().to_string())?;
        let state = pins.join("state");
        let mut storage = MaybeUninit::uninit();
        if let Some(problem) = problem_of_state(&state)? {
            tracing::warn!(
                event = "upgrade-pending",
                reason = %problem,
                "the pinned programs stay until the controller sends the services"
            );
            let skeleton = load(&mut storage, options.sample_every_syn, None)?;
            let mut programs = Self::new(&skeleton, options, Attachment::Tcx, false)?;
            programs.carry_over(&state)?;
            programs.pending_upgrade = Some(maps_of(&skeleton)?);
            return Ok(programs);
        }
        let taken_over = state.exists();
        if !taken_over {
            remove_maps(&pins)?;
        }
        let skeleton = load(&mut storage, options.sample_every_syn, Some(&pins))?;
        let mut programs = Self::new(&skeleton, options, Attachment::Tcx, taken_over)?;
        programs.put_at_device()?;
        Ok(programs)
    }

    fn pins(&self) -> PathBuf {
        self.options.pin_directory.join("server")
    }

    /// Attaches the programs in place of earlier ones.
    fn put_at_device(&mut self) -> anyhow::Result<()> {
        let (pins, index) = (self.pins(), self.options.interface_index);
        self.attachment = tc::attach(self.ingress.as_fd(), index, Direction::Ingress, &pins.join("ingress"))?;
        tc::attach(self.egress.as_fd(), index, Direction::Egress, &pins.join("egress"))?;
        Ok(())
    }

    /// Copies keys and time key from the state of another layout, where all layouts from [`FIRST_LAYOUT_WITH_KEYS`] on
    /// have them: its cookies stay valid, and time continues. Older layouts stamped another cookie, which is not
    /// recognised any more.
    fn carry_over(&mut self, state: &Path) -> anyhow::Result<()> {
        let map = MapHandle::from_pinned_path(state).with_context(|| state.display().to_string())?;
        let old = map.lookup(&0u32.to_ne_bytes(), MapFlags::ANY)?.context("an empty map")?;
        let version = offset_of!(intf::server_state, layout_version);
        let version = old.get(version..version + size_of::<u64>()).map(|bytes| bytes.try_into().expect("eight bytes"));
        if version.map(u64::from_ne_bytes) < Some(FIRST_LAYOUT_WITH_KEYS) {
            tracing::warn!(
                event = "cookies-incompatible",
                pin = %state.display(),
                "pinned cookies have another layout: connections stamped with them break"
            );
            return Ok(());
        }
        for (at, length) in [(KEYS, size_of::<intf::fleet_keys>()), (TIME_KEY, size_of::<intf::cookie_key>())] {
            let bytes = old.get(at..at + length).with_context(|| format!("{}: too short", state.display()))?;
            self.state.write(at, bytes);
        }
        Ok(())
    }

    /// Replaces another version's programs, if those are still at work.
    fn commit_upgrade(&mut self) -> anyhow::Result<()> {
        let Some(maps) = self.pending_upgrade.take() else { return Ok(()) };
        self.put_at_device()?;
        let pins = self.pins();
        for entry in fs::read_dir(&pins)? {
            let path = entry?.path();
            if !LINKS.iter().any(|link| path.ends_with(link)) {
                fs::remove_file(&path).with_context(|| path.display().to_string())?;
            }
        }
        for (map, name) in maps.iter().zip(MAPS) {
            tc::pin_object(map.as_fd(), &pins.join(name))?;
        }
        tracing::info!(event = "upgrade-finished", "this version's programs replace the other ones");
        Ok(())
    }

    /// Loads the programs, attached to nothing and pinned nowhere: for tests by `BPF_PROG_TEST_RUN`, and for temporary
    /// use ([`tc::hold`]).
    pub fn load_only(sample_every_syn: bool) -> anyhow::Result<Self> {
        let mut storage = MaybeUninit::uninit();
        let skeleton = load(&mut storage, sample_every_syn, None)?;
        let options = ServerOptions { interface_index: 0, pin_directory: PathBuf::new(), sample_every_syn };
        Self::new(&skeleton, options, Attachment::Tcx, false)
    }

    fn new(
        skeleton: &ServerSkel<'_>,
        options: ServerOptions,
        attachment: Attachment,
        taken_over: bool,
    ) -> anyhow::Result<Self> {
        let maps = &skeleton.maps;
        let state = MmapArray::<intf::server_state>::new(&maps.bss).context("mapping server_state")?;
        if !taken_over {
            let key = CookieKey::random(&mut UnwrapErr(SysRng));
            state.write(TIME_KEY, &key.layout());
        }
        state.store(offset_of!(intf::server_state, layout_version), intf::SERVER_LAYOUT_VERSION.into());
        Ok(Self {
            options,
            attachment,
            is_taken_over: taken_over,
            ingress: skeleton.progs.server_ingress.as_fd().try_clone_to_owned()?,
            egress: skeleton.progs.server_egress.as_fd().try_clone_to_owned()?,
            rss_map: maps.rss_mapping.as_fd().try_clone_to_owned()?,
            state,
            counter_rows: libbpf_rs::num_possible_cpus()?.min(intf::MAX_CPUS as usize),
            rss: MmapArray::new(&maps.rss_mapping).context("mapping rss_mapping")?,
            chained_servers: MmapArray::new(&maps.bss_chained).context("mapping chained_servers")?,
            outer_ipv6: false,
            pending_upgrade: None,
        })
    }

    /// Whether pinned state of an earlier process was taken over.
    pub fn is_taken_over(&self) -> bool {
        self.is_taken_over
    }

    /// Returns the kind of attachment.
    pub fn attachment(&self) -> Attachment {
        self.attachment
    }

    /// Returns the program of one direction, for `BPF_PROG_TEST_RUN`.
    pub fn program(&self, direction: Direction) -> BorrowedFd<'_> {
        match direction {
            Direction::Ingress => self.ingress.as_fd(),
            Direction::Egress => self.egress.as_fd(),
        }
    }

    /// Returns the map with the server's own RSS, which `steer.bpf.c` shares.
    pub fn rss_map(&self) -> BorrowedFd<'_> {
        self.rss_map.as_fd()
    }

    /// Sets the family of outer headers, which is that of this server's address, for the next
    /// [`set_services`](Self::set_services). IPv4 at first.
    pub fn set_outer_family(&mut self, address: IpAddr) {
        self.outer_ipv6 = address.is_ipv6();
    }

    /// Sets the services of this server, each with its id there and its mode, all at once. Fails when there are too
    /// many, or one is listed twice.
    pub fn set_services(&mut self, services: &[(ServiceAddress, ServerId, ServiceMode)]) -> anyhow::Result<()> {
        let number = |id, mode| number(id, mode, self.outer_ipv6);
        let numbered: Vec<_> = services.iter().map(|(address, id, mode)| (*address, number(*id, *mode))).collect();
        let directory = service_slots::directory(&numbered)?;
        let idle = self.active_half() ^ 1;
        self.state.write(half_offset(idle), &*directory);
        self.state.store(ACTIVE_HALF, idle);
        wait_for_programs()?;
        self.commit_upgrade()
    }

    /// Returns whether the service's last SYN-ACK was forwarded: its sockets are in another network namespace.
    pub fn is_forwarded(&self, service: &ServiceAddress) -> bool {
        let word = service_slots::word(&service.key());
        let slot = service_slots::forwarded_slot(word) * size_of::<u64>();
        self.state.load(offset_of!(intf::server_state, forwarded_services) + slot) == word
    }

    fn active_half(&self) -> u64 {
        self.state.load(ACTIVE_HALF) & 1
    }

    /// Sets the MAC address of a server to which packets may be forwarded (`SERVER_NUMBER_CHAINED`, and those without
    /// timestamps); `None`: unknown, its packets stay here.
    pub fn set_server_mac(&mut self, server: ServerId, mac: Option<MacAddress>) {
        let MacAddress(mac_address) = mac.unwrap_or(MacAddress([0; 6]));
        let flags = if mac.is_some() { intf::SERVER_RESOLVED as u16 } else { 0 };
        let entry = intf::server_entry { mac_address, flags };
        self.chained_servers.write(usize::from(server.get()) * size_of::<intf::server_entry>(), &entry);
    }

    /// Whether there is any service.
    pub fn has_services(&self) -> bool {
        let directory = self.state.read::<intf::service_directory>(half_offset(self.active_half()));
        directory.slots.iter().any(|slot| slot.key.port != 0)
    }

    /// Sets the fleet's cookie keys. From TSval `switch_ms` of the server's own clock (ms) on, packets are stamped with
    /// the current one, earlier ones with the other. `switch_ms` is within 2^31 ms of now, and later than every sent
    /// packet when the current key changes. Before that, the fleet must have both keys.
    pub fn set_keys(&mut self, keys: &FleetKeys, switch_ms: u32) {
        let key = keys.keys.map(|key| key.layout());
        let current = u64::from(switch_ms) << 32 | keys.current.get() as u64;
        // Keys first: the new current one takes the place of an unused one.
        self.state.write(KEYS, &key);
        self.state.store(KEYS + offset_of!(intf::fleet_keys, current), current);
    }

    /// Returns the keys of [`set_keys`](Self::set_keys), also those of an earlier process.
    pub fn keys(&self) -> (FleetKeys, u32) {
        let keys = self.state.read::<intf::fleet_keys>(KEYS);
        let current = if keys.current == 0 { KeyIndex::First } else { KeyIndex::Second };
        (FleetKeys { keys: keys.key.map(|key| CookieKey { k0: key.k0, k1: key.k1 }), current }, keys.switch_ms)
    }

    /// Keeps the time of the last clamp close to the server's own clock (ms). To be called every few days at least,
    /// because the PAWS clamp compares 32-bit times.
    pub fn refresh_clamp_times(&mut self, now_ms: u32) {
        let first = offset_of!(intf::server_state, last_clamp_ms);
        for group in 0..intf::CLAMP_GROUPS as usize {
            let last = self.state.half(first + group * size_of::<u32>());
            let seen = last.load(Ordering::Relaxed);
            let past = now_ms.wrapping_sub(seen) as i32;
            // Also a time that seems to be in the future: nothing was ever clamped, and the clock is beyond 2^31 ms.
            if !(-LAST_CLAMP_AHEAD_MS..=LAST_CLAMP_OLDEST_MS).contains(&past) {
                let old = now_ms.wrapping_sub(LAST_CLAMP_OLDEST_MS as u32);
                // A packet that is clamped now is newer.
                let _ = last.compare_exchange(seen, old, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }

    /// Returns the key that masks the time part of stamps here: this server's own, drawn with the pinned state.
    pub fn time_key(&self) -> CookieKey {
        let key = self.state.read::<intf::cookie_key>(TIME_KEY);
        CookieKey { k0: key.k0, k1: key.k1 }
    }

    /// Sets the server's own RSS, for sampling and steering; `None`: unknown. `generation` is the agent's.
    ///
    /// During the change nothing is predicted. A SYN that met the old table just before may be compared with a mixture,
    /// which the verdict over many SYNs tolerates.
    pub fn set_rss(&mut self, rss: Option<&Rss>, generation: u32) {
        // The first word: entry_count, then generation.
        let header = |entry_count: u32| u64::from(generation) << 32 | u64::from(entry_count);
        self.rss.store(0, header(0));
        if let Some(rss) = rss {
            let mut mapping = rss.mapping(generation);
            let entry_count = std::mem::take(&mut mapping.entry_count);
            self.rss.write(0, &*mapping);
            self.rss.store(0, header(entry_count));
        }
    }

    /// Returns the counters since the state was created, in the order of [`COUNTER_NAMES`].
    pub fn counters(&self) -> [u64; COUNTERS] {
        let mut sums = [0u64; COUNTERS];
        let counters = offset_of!(intf::server_state, counters);
        for row in 0..self.counter_rows {
            let row = counters + row * size_of::<intf::server_counters>();
            for (index, sum) in sums.iter_mut().enumerate() {
                *sum = sum.wrapping_add(self.state.load(row + index * size_of::<u64>()));
            }
        }
        sums
    }

    /// One counter.
    pub fn counter(&self, counter: intf::server_counter) -> u64 {
        self.counters()[counter as usize]
    }

    /// Returns the number of the newest sample; 0: there is none.
    pub fn newest_sample(&self) -> u32 {
        self.state.load(offset_of!(intf::server_state, sample_sequence)) as u32
    }

    /// Returns the SYNs sampled after the one with sequence `after` (0: all), oldest first. At most the last
    /// [`RSS_SAMPLES`](intf::RSS_SAMPLES), without overwritten ones.
    pub fn samples(&self, after: u32) -> Vec<intf::rss_sample> {
        let samples = offset_of!(intf::server_state, samples);
        let all = self.state.read::<[intf::rss_sample; intf::RSS_SAMPLES as usize]>(samples);
        let mut samples: Vec<_> = all.into_iter().filter(|sample| is_newer(sample.sequence, after)).collect();
        samples.sort_by_key(|sample| sample.sequence.wrapping_sub(after));
        samples
    }

    /// Detaches the programs and removes the pins. Connections that are still stamped break.
    pub fn remove(self) -> anyhow::Result<()> {
        remove(self.options.interface_index, &self.options.pin_directory)
    }
}

/// Detaches the programs of [`ServerPrograms::attach`] at a device, and removes the pins.
pub fn remove(interface_index: u32, pin_directory: &Path) -> anyhow::Result<()> {
    let pins = pin_directory.join("server");
    tc::detach(interface_index, Direction::Egress, &pins.join("egress"))?;
    tc::detach(interface_index, Direction::Ingress, &pins.join("ingress"))?;
    remove_maps(&pins)?;
    fs::remove_dir(&pins).with_context(|| pins.display().to_string())
}

/// Rejects a second stamping program: each would put a cookie over the other's, and no connection could open. (Before
/// kernel 6.6 there is one place for ours.)
fn ensure_only_stamper(interface_index: u32, pin_directory: &Path) -> anyhow::Result<()> {
    for elsewhere in pins::other_directories(pin_directory, "server/egress") {
        let pin = elsewhere.join("server").join("egress");
        ensure!(
            !tc::is_attached(interface_index, Direction::Egress, &pin).unwrap_or(false),
            "what is pinned in {} is at the interface of index {interface_index} already: expected `pin_directory` to \
             be that, or \
             first `coreward agent --detach` with that in its file",
            elsewhere.display()
        );
    }
    Ok(())
}

/// Nothing was clamped recently.
const LAST_CLAMP_OLDEST_MS: i32 = 1 << 29;
/// Another CPU may have clamped a packet at a time that seems to be in the future here.
const LAST_CLAMP_AHEAD_MS: i32 = 60_000;

const KEYS: usize = offset_of!(intf::server_state, keys);
const TIME_KEY: usize = offset_of!(intf::server_state, time_key);
const ACTIVE_HALF: usize = offset_of!(intf::server_state, directories) + offset_of!(intf::service_directories, active);

fn half_offset(half: u64) -> usize {
    offset_of!(intf::server_state, directories)
        + offset_of!(intf::service_directories, half)
        + half as usize * size_of::<intf::service_directory>()
}

/// Sequences wrap; 0 marks a sample that was never written.
fn is_newer(sequence: u32, after: u32) -> bool {
    sequence != 0 && sequence != after && sequence.wrapping_sub(after) < u32::MAX / 2
}

const MAPS: [&str; 6] =
    ["state", "held_timestamps", "half_open_indexes", "connection_indexes", "chained_servers", "rss_mapping"];

const LINKS: [&str; 2] = ["ingress", "egress"];

fn maps_of(skeleton: &ServerSkel<'_>) -> anyhow::Result<[OwnedFd; MAPS.len()]> {
    let maps = &skeleton.maps;
    let in_order = [
        maps.bss.as_fd(),
        maps.held_timestamps.as_fd(),
        maps.half_open_indexes.as_fd(),
        maps.connection_indexes.as_fd(),
        maps.bss_chained.as_fd(),
        maps.rss_mapping.as_fd(),
    ];
    let owned: Vec<OwnedFd> = in_order.iter().map(BorrowedFd::try_clone_to_owned).collect::<Result<_, _>>()?;
    Ok(owned.try_into().expect("one per name"))
}

/// Returns `number` of a service's slot for the programs.
fn number(id: ServerId, mode: ServiceMode, outer_ipv6: bool) -> u32 {
    let encapsulates = mode.forwarding.encapsulates();
    let flag = |set: bool, flag: u32| if set { flag } else { 0 };
    u32::from(id.get())
        | flag(mode.is_stamped() && mode.consistency == Consistency::Stateful, intf::SERVER_NUMBER_STATEFUL)
        | flag(!mode.is_stamped(), intf::SERVER_NUMBER_TIMESTAMPS_OFF)
        | flag(mode.marks_previous_server(), intf::SERVER_NUMBER_CHAINED)
        | flag(encapsulates, intf::SERVER_NUMBER_ENCAPSULATED)
        | flag(encapsulates && outer_ipv6, intf::SERVER_NUMBER_OUTER_IPV6)
}

fn remove_maps(pins: &Path) -> anyhow::Result<()> {
    MAPS.iter().try_for_each(|map| remove_if_present(&pins.join(map)))
}

fn remove_if_present(path: &Path) -> anyhow::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error).context(path.display().to_string()),
        _ => Ok(()),
    }
}

/// Returns the reason why [`ServerPrograms::attach`] would not take over the state pinned below `pin_directory`;
/// `None`: it would, or there is none. Fails when the pins cannot be opened.
pub fn pinned_problem(pin_directory: &Path) -> anyhow::Result<Option<String>> {
    problem_of_state(&pin_directory.join("server").join("state"))
}

fn problem_of_state(path: &Path) -> anyhow::Result<Option<String>> {
    if !path.exists() {
        return Ok(None);
    }
    let map = MapHandle::from_pinned_path(path).with_context(|| path.display().to_string())?;
    let (found, expected) = (map.value_size() as usize, size_of::<intf::server_state>());
    if found != expected {
        return Ok(Some(format!("{}: {found} bytes of another version, expected {expected}", path.display())));
    }
    let state = MmapArray::<intf::server_state>::new(&map)?;
    let (found, expected) =
        (state.load(offset_of!(intf::server_state, layout_version)), intf::SERVER_LAYOUT_VERSION.into());
    Ok((found != expected).then(|| format!("{}: layout {found}, expected {expected}", path.display())))
}

fn load<'object>(
    storage: &'object mut MaybeUninit<libbpf_rs::OpenObject>,
    sample_every_syn: bool,
    pins: Option<&Path>,
) -> anyhow::Result<ServerSkel<'object>> {
    let mut open: OpenServerSkel<'_> = ServerSkelBuilder::default().open(storage).context("bpf/server/server.bpf.c")?;
    let rodata = open.maps.rodata_data.as_deref_mut().context("server.bpf.c without read-only data")?;
    rodata.sample_every_syn = sample_every_syn.into();
    let pin = |name: &str| pins.map(|pins| pins.join(name));
    for (map, name, capacity) in [
        (&mut open.maps.held_timestamps, "held_timestamps", intf::MAX_CLAMPED_TIMESTAMPS),
        (&mut open.maps.half_open_indexes, "half_open_indexes", intf::MAX_HALF_OPEN_INDEXES),
    ] {
        lru::set_capacity(map, capacity, pin(name).as_deref())?;
    }
    if let Some(pins) = pins {
        let maps = &mut open.maps;
        let pinned: [&mut OpenMapMut<'_>; MAPS.len()] = [
            &mut maps.bss,
            &mut maps.held_timestamps,
            &mut maps.half_open_indexes,
            &mut maps.connection_indexes,
            &mut maps.bss_chained,
            &mut maps.rss_mapping,
        ];
        for (map, name) in pinned.into_iter().zip(MAPS) {
            map.set_pin_path(pins.join(name)).context(name)?;
        }
    }
    let skeleton = open.load().context("the kernel refused bpf/server/server.bpf.c")?;
    ensure!(
        skeleton.maps.bss.value_size() as usize == size_of::<intf::server_state>(),
        "server.bpf.c keeps more than server_state"
    );
    Ok(skeleton)
}
