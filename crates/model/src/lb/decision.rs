//! Decision on one packet.

use coreward_intf as intf;

use super::packet::TcpTimestampField;
use super::{FrameOutcome, MacAddress, XdpVerdict};
use crate::ServerId;

/// Change of the identification field in the IP header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IpIdentificationChange {
    Unchanged,
    /// The field gets the id of the bucket's previous server, or `NO_SERVER` for none.
    PreviousServerId(u16),
}

/// Decision on a packet, with the destination and the changes of a forwarded packet.
#[derive(Debug, Clone, Copy)]
pub(super) struct PacketDecision {
    pub counter: intf::lb_counter,
    pub destination_mac: MacAddress,
    pub server: Option<ServerId>,
    pub identification_change: IpIdentificationChange,
    /// Position of the TSecr to be replaced, and its new value.
    pub new_tsecr: Option<(TcpTimestampField, u32)>,
    pub extra_event: Option<intf::lb_event>,
    /// Whether the placement rule selected the server of a new connection.
    pub opens_connection: bool,
    /// Whether the packet ends a connection that its cookie identifies.
    pub closes_connection: bool,
}

impl PacketDecision {
    pub fn from_counter(counter: intf::lb_counter) -> Self {
        Self {
            counter,
            destination_mac: [0; 6],
            server: None,
            identification_change: IpIdentificationChange::Unchanged,
            new_tsecr: None,
            extra_event: None,
            opens_connection: false,
            closes_connection: false,
        }
    }

    pub fn forward_to_mac(counter: intf::lb_counter, destination_mac: MacAddress) -> Self {
        Self { destination_mac, ..Self::from_counter(counter) }
    }

    pub fn with_new_tsecr(self, tsecr: TcpTimestampField, value: u32) -> Self {
        Self { new_tsecr: Some((tsecr, value)), ..self }
    }

    pub fn with_opens_connection(self, opens_connection: bool) -> Self {
        Self { opens_connection, ..self }
    }

    pub fn with_closes_connection(self, closes_connection: bool) -> Self {
        Self { closes_connection, ..self }
    }

    pub fn with_identification_change(self, identification: IpIdentificationChange) -> Self {
        Self { identification_change: identification, ..self }
    }

    pub fn with_extra_event(self, event: intf::lb_event) -> Self {
        Self { extra_event: Some(event), ..self }
    }

    pub fn server(&self) -> Option<ServerId> {
        self.server
    }

    pub fn with_previous_server(self, previous_server_id: u16) -> Self {
        Self { identification_change: IpIdentificationChange::PreviousServerId(previous_server_id), ..self }
    }

    pub fn is_forwarded(&self) -> bool {
        self.frame_outcome(None).verdict() == XdpVerdict::Transmit
    }

    pub fn frame_outcome(&self, service_slot: Option<usize>) -> FrameOutcome {
        let server = self.server.filter(|_| self.counter < intf::LB_COUNTER_DROP_MALFORMED_IPV4);
        let syn_table_entry = self.new_tsecr.map(|(_, value)| value).filter(|value| *value != 0 && server.is_some());
        let syn_table_entry = syn_table_entry.filter(|_| self.counter == intf::LB_COUNTER_NEW_CONNECTION);
        FrameOutcome {
            counter: self.counter,
            service_slot,
            server,
            syn_table_entry_index: syn_table_entry,
            event: self.extra_event,
        }
    }
}
