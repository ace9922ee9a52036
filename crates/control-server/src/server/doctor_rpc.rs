//! Answers to `coreward doctor` from machines of the fleet.

use coreward_wire::address::address_bytes;
use coreward_wire::v1;

use super::controller_state::ControllerState;
use coreward_fleet::fleet::{AdminState, FleetServer, FleetService};

/// Returns the fleet's data that `coreward doctor` needs for its checks on a machine.
pub fn fleet_reply(state: &ControllerState) -> v1::FleetReply {
    let controller = state.lock_controller();
    let fleet = controller.fleet();
    let service_message = |service: &FleetService| v1::FleetService {
        name: service.name.clone(),
        address: Some(service.address.into()),
        timestamps: service.mode.timestamps.name().to_owned(),
        forwarding: service.mode.forwarding.name().to_owned(),
        servers: service.members.keys().map(|id| fleet.servers[id].name.clone()).collect(),
    };
    let server_message = |server: &FleetServer| v1::FleetServer {
        name: server.name.clone(),
        address: address_bytes(server.address),
        vlan: server.vlan.get().into(),
    };
    v1::FleetReply {
        services: fleet.services.iter().map(service_message).collect(),
        servers: fleet
            .servers
            .values()
            .filter(|server| server.admin_state != AdminState::Left)
            .map(server_message)
            .collect(),
        reports_ahead: controller.clock_ahead_report_count,
    }
}
