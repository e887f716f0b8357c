# A machine on which nothing is installed.
mkdir -p /run/etc/upper /run/etc/work
mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work /etc
for directory in /opt /usr/local/bin; do mount -t tmpfs tmpfs $directory; done
rm -rf /etc/cni
