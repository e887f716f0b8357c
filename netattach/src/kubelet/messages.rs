//! Messages of the kubelet's PodResources service (kubernetes, `staging/src/k8s.io/kubelet/pkg/apis/podresources/v1`):
//! the fields that are read, and no others.

/// Path of the call that lists the pods of the node.
pub const LIST: &str = "/v1.PodResourcesLister/List";
/// Path of the call that gets one pod.
pub const GET: &str = "/v1.PodResourcesLister/Get";

/// Asks for all pods.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct ListPodResourcesRequest {}

/// All pods.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ListPodResourcesResponse {
    /// The pods of the node, those that have ended possibly among them.
    #[prost(message, repeated, tag = "1")]
    pub pod_resources: Vec<PodResources>,
}

/// Asks for one pod.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct GetPodResourcesRequest {
    /// Name.
    #[prost(string, tag = "1")]
    pub pod_name: String,
    /// Namespace.
    #[prost(string, tag = "2")]
    pub pod_namespace: String,
}

/// One pod.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct GetPodResourcesResponse {
    /// The pod.
    #[prost(message, optional, tag = "1")]
    pub pod_resources: Option<PodResources>,
}

/// A pod.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct PodResources {
    /// Name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Namespace.
    #[prost(string, tag = "2")]
    pub namespace: String,
    /// Its containers.
    #[prost(message, repeated, tag = "3")]
    pub containers: Vec<ContainerResources>,
}

/// A container.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ContainerResources {
    /// Name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its devices.
    #[prost(message, repeated, tag = "2")]
    pub devices: Vec<DevicesOfResource>,
}

/// Devices of one resource, `ContainerDevices` in the API. A resource may be listed several times.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct DevicesOfResource {
    /// The extended resource.
    #[prost(string, tag = "1")]
    pub resource_name: String,
    /// Ids of devices.
    #[prost(string, repeated, tag = "2")]
    pub device_ids: Vec<String>,
}
