//! Options for the network between clients, load balancers and servers, which several commands share.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use coreward_model::forwarding::ForwardingMode;

use crate::addresses::AddressFamily;
use crate::fleet::TestbedFleetOptions;
use crate::topology::TestbedOptions;

/// Options for the network of a testbed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::Args)]
pub struct TestbedNetworkOptions {
    /// Forwarding to the servers; with ipip and gue the servers are behind a router
    #[arg(long, value_name = "KIND", default_value = "l2", value_parser = forwarding_value_parser())]
    pub forwarding: ForwardingMode,
    /// Address family of the VIP, the client and the servers
    #[arg(long, value_enum, default_value_t = AddressFamily::Ipv4)]
    pub family: AddressFamily,
}

impl TestbedNetworkOptions {
    /// Returns the options of a testbed that has this network.
    pub fn to_testbed_options(self) -> TestbedOptions {
        TestbedOptions {
            has_server_router: self.forwarding.encapsulates(),
            family: self.family,
            ..TestbedOptions::default()
        }
    }

    /// Returns the options of a fleet that runs in this network.
    pub fn to_fleet_options(self) -> TestbedFleetOptions {
        TestbedFleetOptions {
            forwarding: self.forwarding,
            server_address_family: self.family,
            ..TestbedFleetOptions::default()
        }
    }
}

fn forwarding_value_parser() -> impl TypedValueParser<Value = ForwardingMode> {
    PossibleValuesParser::new(ForwardingMode::ALL.map(ForwardingMode::name))
        .try_map(|name| name.parse::<ForwardingMode>())
}
