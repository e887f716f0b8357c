// A device plugin, `device-plugin RESOURCE ID...`: tells the kubelet of this machine of devices that need nothing in a
// container. A kubelet that starts removes the sockets of all plugins; this one then serves and registers anew.
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Between two looks at what the kubelet does with sockets.
const pause = 200 * time.Millisecond

type plugin struct {
	resource string
	devices  []*pluginapi.Device
}

func (*plugin) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{}, nil
}

func (own *plugin) ListAndWatch(_ *pluginapi.Empty, stream pluginapi.DevicePlugin_ListAndWatchServer) error {
	if err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: own.devices}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (*plugin) Allocate(_ context.Context, asked *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	given := &pluginapi.AllocateResponse{}
	for range asked.ContainerRequests {
		given.ContainerResponses = append(given.ContainerResponses, &pluginapi.ContainerAllocateResponse{})
	}
	return given, nil
}

// The two calls that the options above rule out.

func (*plugin) GetPreferredAllocation(context.Context, *pluginapi.PreferredAllocationRequest) (*pluginapi.PreferredAllocationResponse, error) {
	return &pluginapi.PreferredAllocationResponse{}, nil
}

func (*plugin) PreStartContainer(context.Context, *pluginapi.PreStartContainerRequest) (*pluginapi.PreStartContainerResponse, error) {
	return &pluginapi.PreStartContainerResponse{}, nil
}

func (own *plugin) register(socket string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	connection, err := grpc.DialContext(ctx, "unix:"+pluginapi.KubeletSocket, grpc.WithInsecure(), grpc.WithBlock())
	if err != nil {
		return err
	}
	defer connection.Close()
	_, err = pluginapi.NewRegistrationClient(connection).Register(ctx, &pluginapi.RegisterRequest{
		Version:      pluginapi.Version,
		Endpoint:     filepath.Base(socket),
		ResourceName: own.resource,
		Options:      &pluginapi.DevicePluginOptions{},
	})
	return err
}

// Serves until a kubelet that starts has removed the socket.
func (own *plugin) serve(socket string) error {
	if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	defer server.Stop()
	pluginapi.RegisterDevicePluginServer(server, own)
	go server.Serve(listener)
	for registered := false; ; time.Sleep(pause) {
		if _, err := os.Lstat(socket); err != nil {
			return err
		}
		if !registered {
			err := own.register(socket)
			registered = err == nil
			fmt.Println("registration:", err)
		}
	}
}

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "device-plugin RESOURCE ID...")
		os.Exit(2)
	}
	own := &plugin{resource: os.Args[1]}
	for _, id := range os.Args[2:] {
		own.devices = append(own.devices, &pluginapi.Device{ID: id, Health: pluginapi.Healthy})
	}
	socket := filepath.Join(pluginapi.DevicePluginPath, strings.ReplaceAll(own.resource, "/", "-")+".sock")
	for ; ; time.Sleep(pause) {
		fmt.Println("socket:", own.serve(socket))
	}
}
