//! The maps of a loaded `bpf/lb.bpf.c`, reached by the program's id: what the load balancer's own interface does not
//! show, because nobody but a test would look.

use std::collections::HashMap;
use std::mem::offset_of;
use std::net::Ipv4Addr;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use anyhow::{Context as _, ensure};
use coreward_dataplane::mapped::Mapped;
use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::cookie::CookieKey;
use coreward_model::lb::{Flow, FlowEntry, ServerTraffic};
use coreward_model::tuple::address_words;
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use zerocopy::FromBytes as _;

type AllTraffic = [intf::server_traffic; ServerId::COUNT];
type Recent = [u64; intf::RECENT_FIRST_PACKETS as usize];

/// 64-bit words of a service's counters.
pub const COUNTER_WORDS: usize = size_of::<intf::lb_counters>() / size_of::<u64>();

/// The program's maps as memory.
pub struct Memory {
    state: Mapped<intf::lb_state>,
    /// The row of receive queue 0.
    counters: Mapped<[intf::lb_counters]>,
    tables: MapHandle,
    recent: Mapped<Recent>,
    traffic: Mapped<AllTraffic>,
    flow_table: MapHandle,
}

impl Memory {
    /// # Errors
    /// When the program's maps cannot be found.
    pub fn of(program: BorrowedFd<'_>) -> anyhow::Result<Self> {
        let id = libbpf_rs::Program::id_from_fd(program).context("the program's id")?;
        let options = ProgInfoQueryOptions::default().include_map_ids(true);
        let info = ProgInfoIter::with_query_opts(options).find(|info| info.id == id).context("not listed")?;
        let maps: Vec<MapHandle> =
            info.map_ids.iter().map(|id| MapHandle::from_map_id(*id)).collect::<Result<_, _>>()?;
        let named = |name: &str| maps.iter().find(|map| map.name() == name).with_context(|| format!("no map {name}"));
        Ok(Self {
            state: Mapped::new(named(".bss.state")?)?,
            counters: Mapped::new_slice(named("lb_counters")?, intf::LB_COUNTERS_PER_ROW as usize)?,
            // The kernel keeps 15 characters of a name.
            tables: MapHandle::try_from(named("placement_memor")?)?,
            recent: Mapped::new(named(".bss.recent")?)?,
            traffic: Mapped::new(named("server_traffic")?)?,
            flow_table: MapHandle::try_from(named("flow_table")?)?,
        })
    }

    /// Word `word` of the counters of service `service`: test runs count in the row of receive queue 0.
    pub fn counter(&self, service: usize, word: usize) -> u64 {
        self.counters.load(service * size_of::<intf::lb_counters>() + word * size_of::<u64>())
    }

    /// Sets until when the tokens of a service are paid for.
    pub fn set_to_all_paid_until(&self, service: usize, paid_until: u64) {
        self.state.store(service_at(service) + offset_of!(intf::service_state, to_all_paid_until), paid_until);
    }

    /// The same for packets whose connection table is lost.
    pub fn set_owner_lost_paid_until(&self, service: usize, paid_until: u64) {
        self.state.store(service_at(service) + offset_of!(intf::service_state, owner_lost_paid_until), paid_until);
    }

    /// Sets what places connections in the connection table: drawn at random otherwise.
    pub fn set_connection_key(&self, key: &CookieKey) {
        let key = intf::cookie_key { k0: key.k0, k1: key.k1 };
        self.state.write(offset_of!(intf::lb_state, connection_key), &key);
    }

    /// The counter of rule ROUND_ROBIN.
    pub fn round_robin(&self, service: usize) -> u64 {
        self.state.load(service_at(service) + offset_of!(intf::service_state, round_robin))
    }

    /// The first `count` counts of connections assigned since the active table was switched in.
    pub fn assigned(&self, service: usize, count: usize) -> Vec<u32> {
        let at = self.state.load(service_at(service) + offset_of!(intf::service_state, table_at)) as u32 as usize;
        if at == 0 {
            return Vec::new();
        }
        let words = self.tables.value_size() as usize / size_of::<u64>();
        let tables = Mapped::<[u64]>::new_slice(&self.tables, words).expect("mapped before");
        let start = tables.half(at + offset_of!(intf::placement_table, assigned_at)).load(Ordering::Relaxed) as usize;
        let words = (0..count.div_ceil(2)).map(|pair| tables.load(start + pair * size_of::<u64>()));
        words.flat_map(|word| [word as u32, (word >> 32) as u32]).take(count).collect()
    }

    /// First packets of a service.
    pub fn opened(&self, service: usize) -> u64 {
        self.state.load(service_at(service) + offset_of!(intf::service_state, opened))
    }

    /// What was sent to a server.
    pub fn traffic(&self, id: ServerId) -> ServerTraffic {
        let position = usize::from(id.get());
        let word = |field| self.traffic.load(position * size_of::<intf::server_traffic>() + field);
        ServerTraffic {
            opened: word(offset_of!(intf::server_traffic, opened)),
            closed: word(offset_of!(intf::server_traffic, closed)),
            packets: word(offset_of!(intf::server_traffic, packets)),
            bytes: word(offset_of!(intf::server_traffic, bytes)),
        }
    }

    /// The flow table.
    ///
    /// # Errors
    /// When an entry cannot be read.
    pub fn flows(&self) -> anyhow::Result<HashMap<Flow, FlowEntry>> {
        let mut flows = HashMap::new();
        for key in self.flow_table.keys() {
            let value = self.flow_table.lookup(&key, MapFlags::ANY)?.context("an entry went away")?;
            let key = intf::flow_table_key::read_from_bytes(&key).map_err(|_| anyhow::anyhow!("a flow's key"))?;
            let value = intf::flow_table_entry::read_from_bytes(&value).map_err(|_| anyhow::anyhow!("a flow"))?;
            let client = Ipv4Addr::from(key.client_address[3].to_ne_bytes());
            ensure!(key.client_address[..3] == address_words(client.into())[..3], "{:x?}", key.client_address);
            let flow = Flow { service: key.service.into(), client: (client, u16::from_be(key.client_port)) };
            let half_open = u32::from(value.before) == intf::HALF_OPEN_FLOW;
            let before = (u32::from(value.before) != intf::NO_SERVER && !half_open).then_some(value.before);
            let before = before.map(|id| ServerId::try_from(u64::from(id))).transpose()?;
            let server = ServerId::try_from(u64::from(value.server_id))?;
            flows.insert(flow, FlowEntry { server, before, half_open });
        }
        Ok(flows)
    }

    /// `recent_first_packets`.
    pub fn recent_first_packets(&self) -> Vec<u64> {
        (0..intf::RECENT_FIRST_PACKETS as usize).map(|word| self.recent.load(word * size_of::<u64>())).collect()
    }
}

fn service_at(service: usize) -> usize {
    offset_of!(intf::lb_state, services) + service * size_of::<intf::service_state>()
}
