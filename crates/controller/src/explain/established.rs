//! Explanation of packets that do not open a connection, as far as the controller can derive their destination.

use coreward_model::ServerId;
use coreward_model::connection_table::decode_cookie_index;
use coreward_model::consistency::{ConsistencyMode, CookieStamper};
use coreward_model::cookie::{self, Cookie};
use coreward_model::lb_stamping;
use coreward_model::placement::PlacementTable;
use coreward_model::tuple::TransportProtocol;

use super::{ConnectionExplainer, ExplainedDestination};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExplainedPacket {
    NewConnection,
    Established {
        /// Echoed timestamp (TSecr) of the packet, or `None` if the packet has no timestamps.
        tsecr: Option<u32>,
        is_reset: bool,
    },
}

const LB_STAMPED_RESET_REASON: &str = "a reset without timestamps follows the load balancer's flow table; \
                                without an entry it is dropped, as these servers accept no broadcast";

impl ConnectionExplainer<'_> {
    pub(super) fn verdict_on_established_connection(
        &self,
        table: Option<&PlacementTable>,
        cookie: Option<u32>,
        reset: bool,
    ) -> ExplainedDestination {
        let service_mode = self.service_snapshot.service.settings;
        match service_mode.consistency {
            ConsistencyMode::None => self.verdict_without_cookie(table),
            ConsistencyMode::HashTable => (None, self.describe_flow_table_decision()),
            ConsistencyMode::Beamer => {
                self.verdict_by_bucket(table, "without an entry in the load balancer's flow table it follows")
            }
            ConsistencyMode::Stateless | ConsistencyMode::Stateful => match cookie {
                Some(tsecr) if service_mode.timestamps == CookieStamper::LoadBalancer => {
                    self.verdict_by_lb_stamped_cookie(tsecr)
                }
                _ if reset && service_mode.timestamps == CookieStamper::LoadBalancer => {
                    (None, LB_STAMPED_RESET_REASON.to_owned())
                }
                Some(tsecr) if service_mode.timestamps == CookieStamper::Server => self.verdict_by_cookie(tsecr),
                _ if reset => {
                    let reason = "a reset without timestamps follows the load balancer's flow table; without an entry \
                                  it is broadcast, and the server with the connection accepts it";
                    (None, reason.to_owned())
                }
                _ => self.verdict_by_bucket(table, "without a cookie it follows the load balancer's flow table, or"),
            },
        }
    }

    fn verdict_without_cookie(&self, table: Option<&PlacementTable>) -> ExplainedDestination {
        let Some(table) = table else { return (None, "no table has been made yet".to_owned()) };
        let (chosen_id, reason) = self.verdict_on_new_connection(table);
        (
            chosen_id,
            format!("no state is stored (consistency \"none\"), so it is placed like a new connection: {reason}"),
        )
    }

    fn describe_flow_table_decision(&self) -> String {
        let unknown_flow_text = match self.service_snapshot.service.address.protocol {
            TransportProtocol::Tcp => "without an entry it is placed like a new connection",
            TransportProtocol::Udp => "without an entry it is placed like the first datagram of a flow",
        };
        format!("the flow table of the load balancer that it reaches decides; {unknown_flow_text}")
    }

    fn verdict_by_bucket(&self, table: Option<&PlacementTable>, reason_start: &str) -> ExplainedDestination {
        let Some(table) = table else { return (None, "no table has been made yet".to_owned()) };
        let Some(key) = table.rss_key_by_group.first() else { return (None, "no server takes connections".to_owned()) };
        let bucket = table.bucket_count.bucket_of_hash(key.toeplitz_hash(&self.four_tuple.bytes())) as usize;
        let Some(server) = table.consistent_server_by_bucket.get(bucket).copied() else {
            return (None, "no server takes connections".to_owned());
        };
        let server_name = self.server_name(server);
        let previous_server_note = match table.previous_consistent_server_by_bucket.get(bucket).copied().flatten() {
            Some(previous_server) if previous_server != server => {
                format!(
                    "; without such a connection {server_name} forwards it to {}, the bucket's previous server",
                    self.server_name(previous_server)
                )
            }
            _ => String::new(),
        };
        (
            Some(server),
            format!(
                "{reason_start} bucket {bucket} of {} to {server_name}{previous_server_note}",
                table.bucket_count.get()
            ),
        )
    }

    fn verdict_by_cookie(&self, tsecr: u32) -> ExplainedDestination {
        let keys = &self.service_snapshot.cookie_keys;
        let key_slot = if tsecr & coreward_intf::COOKIE_KEY_BIT == 0 { 0 } else { 1 };
        match cookie::decode_cookie(keys, &self.four_tuple, tsecr) {
            Cookie::Server(id) if self.service_snapshot.service.members.contains_key(&id) => (
                Some(id),
                format!("its cookie, made with key {key_slot}, names server id {}, {}", id.get(), self.server_name(id)),
            ),
            Cookie::Server(id) => (None, self.describe_unknown_server(key_slot, id)),
            Cookie::TableIndex(number) => (None, self.describe_connection_table_entry(key_slot, number)),
        }
    }

    /// Returns the verdict by a cookie that a load balancer stamped. Connections without such a cookie are in the flow
    /// table.
    fn verdict_by_lb_stamped_cookie(&self, tsecr: u32) -> ExplainedDestination {
        let id = lb_stamping::decode_server_id(&self.service_snapshot.cookie_keys, &self.four_tuple, tsecr);
        let reason_start = "without an entry in the load balancer's flow table its cookie decides:";
        if self.service_snapshot.service.members.contains_key(&id) {
            return (Some(id), format!("{reason_start} it names server id {}, {}", id.get(), self.server_name(id)));
        }
        (
            None,
            format!("{reason_start} it names server id {}, which no server has, and the packet is dropped", id.get()),
        )
    }

    fn describe_unknown_server(&self, key_slot: u32, id: ServerId) -> String {
        format!(
            "its cookie, read with key {key_slot}, names server id {}, which no server has: it is forged, damaged, or \
             of a replaced key; the packet is broadcast at a limited rate, and the server with the connection \
             accepts it",
            id.get()
        )
    }

    fn describe_connection_table_entry(&self, key_slot: u32, cookie_index: u16) -> String {
        if self.service_snapshot.service.settings.consistency != ConsistencyMode::Stateful {
            return format!(
                "its cookie, read with key {key_slot}, names an entry of a connection table, which this service does \
                 not have: the packet is broadcast at a limited rate"
            );
        }
        let (owner, slot) = decode_cookie_index(cookie_index);
        let owner_name = self.service_snapshot.table_owner_names.iter().find(|(known_owner, _)| *known_owner == owner);
        match owner_name {
            Some((_, name)) => format!(
                "its cookie, made with key {key_slot}, names slot {slot} in the connection table of load balancer \
                 {name} (`coreward connections` there shows the server)"
            ),
            None => format!(
                "its cookie, read with key {key_slot}, names slot {slot} in the connection table of owner {owner}, \
                 which no load balancer has: the packet is broadcast, and the server with the connection accepts it"
            ),
        }
    }
}
